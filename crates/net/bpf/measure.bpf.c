// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * For tests and measurements over veth: `generate`, run by BPF_PROG_TEST_RUN with live frames, sends datagrams
 * of IPv4 by several devices in turn; `sink` counts such frames and drops them; `pass` does nothing but have
 * its device do NAPI; `all` lets a packet socket have each frame.
 *
 * A live frame is given back as the last receiver left it, so that all headers are written every time.
 *
 * Numbered frames have a number behind their UDP header, host byte order; of these the sink counts those that are
 * late: with a number lower than one that has come before (RFC 4737 section 3.3). One receive queue is assumed
 * then, whose frames are handled one after the other.
 *
 * Layouts of the maps: tests/live/mod.rs, ../bench/src/live.rs.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define DEVICES_MAX 1024
#define DESTINATIONS_MAX (1 << 20)
#define DISCARD_PORT 9 /* RFC 863 */
#define NS_A_SECOND 1000000000ull

struct headers {
	struct ethhdr ethernet;
	struct iphdr ip;
	struct udphdr udp;
} __attribute__((packed));

struct numbered {
	struct headers headers;
	__u8 number[8];
} __attribute__((packed));

/* With those of a tunnel: Ethernet, IPv4, UDP and VXLAN, and the frame in it. */
struct tunnelled {
	struct headers outer;
	__u8 vxlan[8];
	struct headers inner;
} __attribute__((packed));

struct settings {
	__u32 devices; /* how many */
	__u32 shift; /* 1 << shift frames to a device before the next */
	__u64 pps; /* frames a second; 0: as many as go */
	__u64 since; /* of the monotonic clock; 0: it is the next frame */
	__u64 made; /* since then, by whichever CPU */
	__u32 destinations; /* how many, in turn, a power of two; 0: that of the headers */
	__u32 numbered; /* whether frames are */
};

struct device {
	__u32 ifindex;
	__u32 note; /* before the frame, as for a port's program (pdp_ports.h): its number and 1; 0: none */
	__u32 tunnelled; /* whether the headers are struct tunnelled */
	__u32 sum; /* of the IPv4 header without destination and checksum, 16 bits at a time, for `destinations` */
	__u8 headers[96];
};

struct order {
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
	__uint(max_entries, DEVICES_MAX);
	__type(key, __u32);
	__type(value, struct device);
} devices SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, DESTINATIONS_MAX);
	__type(key, __u32);
	__type(value, __be32);
} destinations SEC(".maps");

/* Made, and came. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct order);
} order SEC(".maps");

SEC("xdp")
int generate(struct xdp_md *context)
{
	void *end = (void *)(long)context->data_end;
	struct numbered *frame = (void *)(long)context->data;
	struct tunnelled *tunnelled = (void *)frame;
	__u32 made = 0, at;
	struct settings *now = bpf_map_lookup_elem(&settings, &made);
	__u64 *count = bpf_map_lookup_elem(&counters, &made);
	struct device *device;

	if (!now || !count || (void *)(frame + 1) > end)
		return XDP_ABORTED;
	if (now->pps) {
		__u64 ns = bpf_ktime_get_ns();
		if (!now->since)
			now->since = ns;
		if (now->made > (ns - now->since) * now->pps / NS_A_SECOND)
			return XDP_DROP; /* not due yet */
		now->made += 1;
	}
	at = (*count >> now->shift) % now->devices;
	device = bpf_map_lookup_elem(&devices, &at);
	if (!device)
		return XDP_ABORTED;
	if (device->tunnelled) {
		if ((void *)(tunnelled + 1) > end)
			return XDP_ABORTED;
		__builtin_memcpy(tunnelled, device->headers, sizeof(*tunnelled));
	} else {
		__builtin_memcpy(frame, device->headers, sizeof(frame->headers));
	}
	if (now->destinations) {
		__u32 sum;
		__be32 *destination;
		at = *count & (now->destinations - 1);
		destination = bpf_map_lookup_elem(&destinations, &at);
		if (!destination)
			return XDP_ABORTED;
		sum = device->sum + (*destination & 0xffff) + (*destination >> 16);
		sum = (sum & 0xffff) + (sum >> 16);
		sum = (sum & 0xffff) + (sum >> 16);
		frame->headers.ip.daddr = *destination;
		frame->headers.ip.check = ~sum;
	}
	if (now->numbered)
		__builtin_memcpy(frame->number, count, sizeof(frame->number));
	if (device->note) {
		__u32 *note;
		if (bpf_xdp_adjust_meta(context, -(int)sizeof(*note)))
			return XDP_ABORTED;
		note = (void *)(long)context->data_meta;
		if ((void *)(note + 1) > (void *)(long)context->data)
			return XDP_ABORTED;
		*note = device->note - 1;
	}
	*count += 1;
	return bpf_redirect(device->ifindex, 0);
}

SEC("xdp")
int sink(struct xdp_md *context)
{
	void *end = (void *)(long)context->data_end;
	struct numbered *frame = (void *)(long)context->data;
	struct headers *headers = &frame->headers;
	__u32 came = 1, zero = 0;
	__u64 *count = bpf_map_lookup_elem(&counters, &came);
	struct settings *now = bpf_map_lookup_elem(&settings, &zero);

	if (!count || !now || (void *)(headers + 1) > end)
		return XDP_PASS;
	if (headers->ethernet.h_proto != bpf_htons(ETH_P_IP) || headers->ip.ihl != 5 ||
	    headers->ip.protocol != IPPROTO_UDP || headers->udp.dest != bpf_htons(DISCARD_PORT))
		return XDP_PASS;
	*count += 1;
	if (now->numbered && (void *)(frame + 1) <= end) {
		struct order *last = bpf_map_lookup_elem(&order, &zero);
		__u64 number;
		if (!last)
			return XDP_DROP;
		__builtin_memcpy(&number, frame->number, sizeof(number));
		if (number < last->next)
			last->late += 1;
		else
			last->next = number + 1;
	}
	return XDP_DROP;
}

SEC("xdp")
int pass(struct xdp_md *context)
{
	return XDP_PASS;
}

SEC("socket")
int all(struct __sk_buff *frame)
{
	return -1; /* bytes of it */
}

char LICENSE[] SEC("license") = "GPL";
