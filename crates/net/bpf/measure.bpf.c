// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * For tests and measurements over veth: `generate`, run by BPF_PROG_TEST_RUN with live frames, sends datagrams
 * of IPv4 by several devices in turn; `sink` counts such frames and drops them; `pass` does nothing but have
 * its device do NAPI; `all` lets a packet socket have each frame.
 *
 * A live frame is given back as the last receiver left it, so that all headers are written every time.
 *
 * Layouts of the maps: tests/live/mod.rs.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define DEVICES_MAX 1024
#define DISCARD_PORT 9 /* RFC 863 */
#define NS_A_SECOND 1000000000ull

struct headers {
	struct ethhdr ethernet;
	struct iphdr ip;
	struct udphdr udp;
} __attribute__((packed));

struct settings {
	__u32 mask; /* how many devices, minus one; a power of two */
	__u32 shift; /* 1 << shift frames to a device before the next */
	__u64 pps; /* frames a second; 0: as many as go */
	__u64 since; /* of the monotonic clock; 0: it is the next frame */
	__u64 made; /* since then, by whichever CPU */
};

struct device {
	__u32 ifindex;
	__u32 note; /* before the frame, as for a port's program (pdp_ports.h): its number and 1; 0: none */
	__u8 headers[44]; /* 42 bytes */
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

/* Made, and came. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 2);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

SEC("xdp")
int generate(struct xdp_md *context)
{
	struct headers *frame = (void *)(long)context->data;
	__u32 made = 0, at;
	struct settings *now = bpf_map_lookup_elem(&settings, &made);
	__u64 *count = bpf_map_lookup_elem(&counters, &made);
	struct device *device;

	if (!now || !count || (void *)(frame + 1) > (void *)(long)context->data_end)
		return XDP_ABORTED;
	if (now->pps) {
		__u64 ns = bpf_ktime_get_ns();
		if (!now->since)
			now->since = ns;
		if (now->made > (ns - now->since) * now->pps / NS_A_SECOND)
			return XDP_DROP; /* not due yet */
		now->made += 1;
	}
	at = (*count >> now->shift) & now->mask;
	device = bpf_map_lookup_elem(&devices, &at);
	if (!device)
		return XDP_ABORTED;
	__builtin_memcpy(frame, device->headers, sizeof(*frame));
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
	struct headers *frame = (void *)(long)context->data;
	__u32 came = 1;
	__u64 *count = bpf_map_lookup_elem(&counters, &came);

	if (!count || (void *)(frame + 1) > (void *)(long)context->data_end)
		return XDP_PASS;
	if (frame->ethernet.h_proto != bpf_htons(ETH_P_IP) || frame->ip.protocol != IPPROTO_UDP ||
	    frame->udp.dest != bpf_htons(DISCARD_PORT))
		return XDP_PASS;
	*count += 1;
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
