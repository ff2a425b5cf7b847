#!/bin/bash
# Runs inside the virtual machine, once per boot, after pdpd. Each line `VM: …` on the console is
# read by tests/e2e/beside/stock_debian.rs, which holds the expectations.
export PDP_SOCKET=/run/pdp/pdpd.sock
say() { echo "VM: $*" > /dev/ttyS0; }

say "boot $(cat /proc/sys/kernel/random/boot_id)"
say "kernel $(uname -r)"
say "cgroups $(stat -fc %T /sys/fs/cgroup) v1=$(grep -c ' cgroup ' /proc/mounts)"

first=
if [ ! -e /var/lib/vm-applied ]; then
    first=yes
    pdp apply -f /root/ospf.yaml > /root/apply.log 2>&1
    say "apply $? $(tail -n 3 /root/apply.log | tr '\n' ' ')"
    touch /var/lib/vm-applied
fi

# OSPF has to find its neighbour and routes first, and an emulated machine on a busy one may lose
# them for a while: five in a row, within far more time than that takes.
end=$((SECONDS + 180))
while received=$(pdp exec ospf/h1 -- ping -c 5 -i 0.2 -W 2 10.2.0.2 2>&1 | grep -o '[0-9]* received')
    [ "$received" != "5 received" ] && [ $SECONDS -lt $end ]; do
    sleep 1
done
say "ping $received"
say "ospf $(pdp exec ospf/r1 -- ip route show proto ospf 10.2.0.0/24 2>&1 | head -1)"

# Every forwarding guest's limit as the kernel has it: quota and period in microseconds.
for limit in $(find /sys/fs/cgroup/pdp/vnets/_ospf -maxdepth 2 -name cpu.max | sort); do
    say "cpu.max ${limit#/sys/fs/cgroup/} $(cat "$limit")"
done

# A VRF keeps what comes by h1's link from the routes that OSPF found, and that is told.
if [ "$first" ]; then
    modprobe vrf
    for line in "link add blue type vrf table 10" "link set blue up" "link set eth0 master blue"; do
        pdp exec ospf/r1 -- ip $line
    done
    end=$((SECONDS + 60))
    while told=$(pdp get | grep -o 'eth0 is in VRF blue'); [ -z "$told" ] && [ $SECONDS -lt $end ]; do
        sleep 0.2
    done
    say "vrf $told, $(pdp exec ospf/h1 -- ping -c 3 -i 0.2 -W 1 10.2.0.2 2>&1 | grep -o '[0-9]* received')"
    pdp exec ospf/r1 -- ip link del blue
fi

# A spinning process in a guest's cgroup gets the limit and no more: CPU time over 4 s.
if [ "$first" ]; then
    group=/sys/fs/cgroup/pdp/vnets/_ospf/_r1.g0
    leaf=$(find $group -mindepth 1 -type d | head -1)
    before=$(awk '/^usage_usec/ {print $2}' $group/cpu.stat)
    ( echo $BASHPID > "${leaf:-$group}/cgroup.procs"; exec timeout 4 sh -c 'while :; do :; done' )
    after=$(awk '/^usage_usec/ {print $2}' $group/cpu.stat)
    say "spin_us $((after - before))"
fi

# Two vrouters that the kernel forwards for, and that it joins by itself.
if [ "$first" ]; then
    say "links $(pdp doctor --format json 2>&1 | jq -r ".[] | select(.name == \"kernel links\") | .state + \" \" + .detail")"
    pdp apply -f /root/kernel.yaml > /root/kernel.log 2>&1
    end=$((SECONDS + 180))
    while received=$(pdp exec kernel/h1 -- ping -c 5 -i 0.2 -W 2 10.2.0.2 2>&1 | grep -o '[0-9]* received')
        [ "$received" != "5 received" ] && [ $SECONDS -lt $end ]; do
        sleep 1
    done
    say "kernel-ping $received"
    say "kernel-port $(pdp stats kernel --format json | jq -c '.vnets.kernel.nodes.r1.ports.eth1 | [.made, .sent]')"
    pdp delete kernel > /root/kernel.log 2>&1
    say "kernel-gone $?"
fi

pdp stats --format json > /root/stats.json 2>&1
say "stats $(jq -c '[.. | .toGuest? // empty] | add' /root/stats.json)"
say "end"
sync
systemctl --no-block reboot
