// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * A generator and a sink of frames inside the kernel, for measurements over veth.
 *
 * `generate` is run by BPF_PROG_TEST_RUN with live frames: the kernel gives it frames of its own
 * and sends them where it says. It gives a frame back as the last receiver left it, so all headers
 * are written every time. Each frame carries a number behind its UDP header, host byte order.
 *
 * `sink`, on the receiving interface, counts and drops such frames, and those that are late: with a
 * number lower than one that has come before (RFC 4737 section 3.3). All other frames pass. One
 * receive queue is assumed, whose frames are handled one after the other.
 *
 * Names and layouts of the maps: src/live.rs.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define DESTINATIONS_MAX (1 << 20)
#define DISCARD_PORT 9 /* RFC 863 */
#define NS_A_SECOND 1000000000ull

struct frame {
	struct ethhdr ethernet;
	struct iphdr ip;
	struct udphdr udp;
	__u8 number[8];
} __attribute__((packed));

struct settings {
	__u32 ifindex; /* where to send */
	__u32 mask; /* how many destinations, minus one; a power of two */
	__u32 sum; /* of the IPv4 header without destination and checksum, 16 bits at a time */
	__u8 headers[44]; /* Ethernet, IPv4, UDP: 42 bytes */
};

struct pace {
	__u64 pps; /* frames a second to make; 0: as many as go */
	__u64 since; /* the first frame, nanoseconds of the monotonic clock; 0: it is the next */
	__u64 made; /* frames made before it */
};

struct counters {
	__u64 made; /* by the generator */
	__u64 came; /* to the sink */
	__u64 late;
	__u64 next; /* the highest number that came, plus one */
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct settings);
} settings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct pace);
} pace SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DESTINATIONS_MAX);
	__type(key, __u32);
	__type(value, __be32);
} destinations SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct counters);
} counters SEC(".maps");

SEC("xdp")
int generate(struct xdp_md *context)
{
	struct frame *frame = (void *)(long)context->data;
	__u32 zero = 0, at, sum;
	__u64 ns;
	struct settings *now = bpf_map_lookup_elem(&settings, &zero);
	struct counters *count = bpf_map_lookup_elem(&counters, &zero);
	struct pace *keep = bpf_map_lookup_elem(&pace, &zero);
	__be32 *destination;

	if (!now || !count || !keep || (void *)(frame + 1) > (void *)(long)context->data_end)
		return XDP_ABORTED;
	if (keep->pps) {
		ns = bpf_ktime_get_ns();
		if (!keep->since) {
			keep->since = ns;
			keep->made = count->made;
		}
		if (count->made - keep->made > (ns - keep->since) * keep->pps / NS_A_SECOND)
			return XDP_DROP; /* not due yet */
	}
	at = count->made & now->mask;
	destination = bpf_map_lookup_elem(&destinations, &at);
	if (!destination)
		return XDP_ABORTED;
	__builtin_memcpy(frame, now->headers, sizeof(*frame) - sizeof(frame->number));
	sum = now->sum + (*destination & 0xffff) + (*destination >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	frame->ip.daddr = *destination;
	frame->ip.check = ~sum;
	__builtin_memcpy(frame->number, &count->made, sizeof(frame->number));
	count->made += 1;
	return bpf_redirect(now->ifindex, 0);
}

SEC("xdp")
int sink(struct xdp_md *context)
{
	struct frame *frame = (void *)(long)context->data;
	__u32 zero = 0;
	struct counters *count = bpf_map_lookup_elem(&counters, &zero);
	__u64 number;

	if (!count || (void *)(frame + 1) > (void *)(long)context->data_end)
		return XDP_PASS;
	if (frame->ethernet.h_proto != bpf_htons(ETH_P_IP) || frame->ip.ihl != 5 ||
	    frame->ip.protocol != IPPROTO_UDP || frame->udp.dest != bpf_htons(DISCARD_PORT))
		return XDP_PASS;
	__builtin_memcpy(&number, frame->number, sizeof(number));
	count->came += 1;
	if (number < count->next)
		count->late += 1;
	else
		count->next = number + 1;
	return XDP_DROP;
}

/* The kernel knows no word for "GPL-2.0 OR Apache-2.0"; the programs call no GPL-only helper, and
 * this is what they may be taken as. */
char LICENSE[] SEC("license") = "GPL";
