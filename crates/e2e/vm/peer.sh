#!/bin/bash
# Init of the virtual machine at the other ends of tunnels: says its kernel's version by the second serial
# port, then runs each line that comes there, and says what it wrote and how it ended. All that is said or
# comes ends with a zero byte. At the other side is tests/e2e/beside/stock_debian/tunnels.rs.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
stty -F /dev/ttyS1 raw -echo
exec < /dev/ttyS1 > /dev/ttyS1
printf '%s\0' "$(uname -r)"
while IFS= read -r -d '' line; do
    words=$(bash -ec "$line" 2>&1 < /dev/null)
    printf '%s\0%d\0' "$words" $?
done
