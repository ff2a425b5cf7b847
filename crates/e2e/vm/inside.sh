#!/bin/bash
# Runs inside the virtual machine, once per boot, after pdpd. Each line `VM: …` on the console is
# read by tests/e2e/beside/stock_debian.rs, which holds the expectations.
export PDP_SOCKET=/run/pdp/pdpd.sock
say() { echo "VM: $*" > /dev/ttyS0; }

say "boot $(cat /proc/sys/kernel/random/boot_id)"
say "kernel $(uname -r)"
say "cgroups $(stat -fc %T /sys/fs/cgroup) v1=$(grep -c ' cgroup ' /proc/mounts)"

if grep -qw vm.limits /proc/cmdline; then
    . /root/limits.sh
    say "end"
    sync
    systemctl --no-block reboot
    exit
fi

first=
if [ ! -e /var/lib/vm-applied ]; then
    first=yes
    pdp apply -f /root/ospf.yaml > /root/apply.log 2>&1
    say "apply $? $(tail -n 3 /root/apply.log | tr '\n' ' ')"
    touch /var/lib/vm-applied
fi

# What the last of a vnet's h1 pinging its h2 says. OSPF has to find its neighbour and routes first, and an emulated
# machine on a busy one may lose them for a while: five in a row, within far more time than that takes.
pings() { # VNET
    local end=$((SECONDS + 180)) received
    while received=$(pdp exec "$1/h1" -- ping -c 5 -i 0.2 -W 2 10.2.0.2 2>&1 | grep -o '[0-9]* received')
        [ "$received" != "5 received" ] && [ $SECONDS -lt $end ]; do
        sleep 1
    done
    echo "$received"
}
say "ping $(pings ospf)"
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
    say "kernel-ping $(pings kernel)"
    say "kernel-port $(pdp stats kernel --format json | jq -c '.vnets.kernel.nodes.r1.ports.eth1 | [.made, .sent]')"

    # ESP in tunnel mode between them (RFC 4303) for what the hosts send each other.
    modprobe -a esp4 xfrm_user
    tunnel() { # ROUTER NUMBER OTHER: networks 10.NUMBER.0.0/24 behind 10.0.12.NUMBER
        local from to key=0x$(printf '%040d' 7)
        for way in "$2 $3" "$3 $2"; do
            read -r from to <<< "$way"
            pdp exec "kernel/$1" -- ip xfrm state add src "10.0.12.$from" dst "10.0.12.$to" proto esp \
                spi "0x100$from" mode tunnel aead 'rfc4106(gcm(aes))' "$key" 128
        done
        for way in "out $2 $3" "in $3 $2" "fwd $3 $2"; do
            read -r way from to <<< "$way"
            pdp exec "kernel/$1" -- ip xfrm policy add src "10.$from.0.0/24" dst "10.$to.0.0/24" dir "$way" \
                tmpl src "10.0.12.$from" dst "10.0.12.$to" proto esp mode tunnel
        done
    }
    { tunnel r1 1 2; tunnel r2 2 1; } > /root/esp.log 2>&1
    say "esp-ping $(pings kernel) $(tail -n 3 /root/esp.log | tr '\n' ' ')"
    say "esp $(pdp exec kernel/r2 -- ip -s xfrm state | grep -o '[0-9]*(packets)' | tr -dc '0-9\n' | tr '\n' ' ')"
    pdp delete kernel > /root/kernel.log 2>&1
    say "kernel-gone $?"
fi

# An external by AF_XDP, the default. Beyond a veth is a machine that pings a host of a network.
if [ "$first" ]; then
    say "af-xdp $(pdp doctor --format json 2>&1 | jq -r '.[] | select(.name == "AF_XDP") | .state + " " + .detail')"
    ip netns add beyond
    ip link add beyond0 type veth peer name eth0 netns beyond
    ip link set beyond0 up
    ip -n beyond addr add 10.9.0.2/24 dev eth0
    ip -n beyond addr add fd09::2/64 dev eth0 nodad
    ip -n beyond link set eth0 up
    pdp apply -f /root/external.yaml > /root/external.log 2>&1
    say "external-apply $? $(tail -n 3 /root/external.log | tr '\n' ' ')"
    for address in 10.9.0.1 fd09::1; do
        end=$((SECONDS + 60))
        while received=$(ip netns exec beyond ping -c 5 -i 0.2 -W 2 $address 2>&1 | grep -o '[0-9]* received')
            [ "$received" != "5 received" ] && [ $SECONDS -lt $end ]; do
            sleep 1
        done
        say "external-ping-$address $received"
    done
    say "external-told $(pdp get 2>&1 | grep -c -e 'AF_XDP' -e 'packet sockets')"
    # The device is gone after the next boot.
    sed -e '/^---/,$d' -e '/interfaces/d' /root/external.yaml > /root/substrate.yaml
    { pdp delete outside && pdp apply -f /root/substrate.yaml; } > /root/external.log 2>&1
    say "external-gone $? $(tail -n 3 /root/external.log | tr '\n' ' ')"
fi

pdp stats --format json > /root/stats.json 2>&1
say "stats $(jq -c '[.. | .toGuest? // empty] | add' /root/stats.json)"
say "end"
sync
systemctl --no-block reboot
