#!/bin/bash
# Runs inside the virtual machine in place of inside.sh's rest: guests of two tenants ask their kernel for more than is
# theirs, with the capabilities that they have. tests/e2e/beside/stock_debian.rs holds the expectations. Its kernel has
# no IPv6.
modprobe -a dummy nf_conntrack nf_conntrack_netlink nft_ct
requests() { pdp exec "$1" -- perl /usr/local/share/requests.pl "${@:2}" 2>&1 | tail -1; }
inside() { # VNET COMMAND...: in the network namespace of its host, as root of the machine
    nsenter -t "$(head -1 /sys/fs/cgroup/pdp/vnets/"$1"/_h/guest/cgroup.procs)" -n "${@:2}"
}
state() { pdp doctor --format json 2>&1 | jq -r ".[] | select(.name == \"$1\") | .state + \" \" + .detail"; }

pdp apply -f /root/limits.yaml > /root/limits.log 2>&1
say "limits-apply $? $(tail -n 3 /root/limits.log | tr '\n' ' ')"
for check in "guest bounds" "socket memory" "tracked connections"; do
    say "${check// /-} $(state "$check")"
done

# All but IPv6 works.
say "families $(cd /proc/sys/net && ls -d ipv4 ipv6 2> /dev/null | tr '\n' ' ')"
for check in TAP "kernel links"; do
    say "${check// /-} $(state "$check")"
done
say "ping $(pdp exec other.lab/h -- ping -c 3 -i 0.2 -W 5 10.0.0.2 2>&1 | grep -o '[0-9]* received')"
say "refused $(sed 's|10.0.0.2/24|2001:db8::2/64|' /root/limits.yaml | pdp apply -f - 2>&1 | tr '\n' ' ')"

# 64 interfaces at once; the tenant's other network has the same part, another tenant its own, and root any number.
say "links $(requests acme.lab/h link 150 1)"
say "links-same $(requests acme.more/h link 40 1)"
say "links-others $(requests other.lab/h link 20 1)"
say "links-root $(inside _other_lab perl /usr/local/share/requests.pl link 264 1 | tail -1)"
# Routes and reading have no such bound.
say "routes $(requests acme.lab/h route 5000 50)"
say "reading $(pdp exec acme.lab/h -- ip -br link show lo 2>&1 | cut -d' ' -f1)"
# What was used is not had again by a new daemon.
systemctl restart pdpd
say "links-again $(requests acme.lab/h link 150 1)"
# It comes back with time.
sleep 12
# A call that exceeds all that an owner can save up never passes, and says so.
say "links-call $(requests acme.more/h link 65 65)"
say "links-later $(requests acme.more/h link 20 1)"
# Each namespace has 320 interfaces, whoever made them.
sleep 5
say "links-most $(requests other.lab/h link 60 1) $(inside _other_lab ip -br link | wc -l)"
# Neighbours, bridge entries and connections that are made by hand.
say "entries $(requests acme.lab/h neighbour 40000 50)"
say "entries-others $(requests other.lab/h neighbour 100 50)"
say "tracked $(requests other.lab/h tracked 20000 50) $(inside _other_lab cat /proc/sys/net/netfilter/nf_conntrack_count)"

# How long others wait meanwhile: told, not judged. 24 processes make and remove bridges without end.
restart() { local begun=$(date +%s%N); timeout 120 pdp restart other.lab/h > /dev/null 2>&1; echo $((($(date +%s%N) - begun) / 1000000)); }
modprobe bridge
flood='for w in $(seq 24); do ( i=0; while :; do i=$((i+1)); ip link add w${w}_$i type bridge; ip link del w${w}_$i; done ) & done; wait'
say "restart-alone $(restart) ms"
timeout 60 pdp exec acme.lab/h -- timeout 40 sh -c "$flood" > /dev/null 2>&1 &
sleep 5
say "restart-beside $(restart) ms"
wait
# One request may change all interfaces of a namespace: up and down, and then others' restarts meanwhile.
sleep 12
say "group $(requests acme.more/h group 200 1)"
say "group-on $(inside _acme_more ip -br link show group 7 | wc -l) interfaces"
sleep 12
timeout 60 pdp exec acme.more/h -- timeout 40 sh -c 'for w in $(seq 24); do perl /usr/local/share/requests.pl group 100000 1 & done; wait' > /dev/null 2>&1 &
sleep 5
say "restart-beside-group $(restart) ms"
wait
pdp delete acme.lab acme.more other.lab > /root/limits.log 2>&1
say "left $(ls /sys/fs/bpf/pdp 2>/dev/null | tr '\n' ' ')"
