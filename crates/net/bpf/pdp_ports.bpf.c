// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * The two programs at the ports of a kernel vrouter: `pdp_out` at the root end of its veth sees all that the
 * vrouter's stack sends, and says what becomes of it; `pdp_in` at the inner end, in the vrouter's namespace, sees all
 * that is delivered to it, charges the vrouter for the time that it takes, and sends what the namespace would only
 * route straight on, as `pdp_out` would at the port that it leaves by (pdp_short.h). Both count. Nothing ever reaches
 * the stack of PdP's namespace.
 *
 * A link is a wire: what goes in comes out, whatever its addresses, type, tags or contents, if it has an Ethernet
 * header and no more bytes than fit.
 */
#include "pdp_short.h"
#include "pdp_tunnels.h"

#define SPREAD_FIRST 49152 /* of source ports, crates/wire/src/udp.rs */

/* The headers before what leaves by a tunnel, ready but for what each frame changes. */
struct outside {
	__u8 headers[HEADERS_BYTES_MAX];
	__u16 mtu; /* longest IP packet; 0: the next hop is not known */
	__u32 headers_bytes;
	__u32 sum; /* of the IPv4 header's words, with a length and a mark of 0; of IPv6, 0 */
	__u32 spread; /* whether the source port is by the inner flow */
	struct tunnel tunnel; /* for src/ports alone */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, PORTS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32); /* number of the port */
	__type(value, struct outside);
} outsides SEC(".maps");

/* External interfaces, by the number of the port. */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP_HASH);
	__uint(max_entries, PORTS_MAX);
	__type(key, __u32);
	__type(value, __u32);
} devices SEC(".maps");

static __always_inline __u64 mix(__u64 hash, __u64 word)
{
	hash = (hash ^ word) * 0x9e3779b97f4a7c15;
	return hash ^ hash >> 32;
}

/* Of addresses, protocol and ports of a frame (not of fragments), or of what it has of that. */
static __always_inline __u32 flow_of(void *frame, void *end)
{
	int version = 0, whole = 1;
	__u8 *ip = packet_of(frame, end, &version), *ports, protocol;
	__u64 hash = 0;

	if (!ip) {
		if (frame + ETH_HLEN > end)
			return 0;
		return mix(mix(0, *(__u64 *)frame), *(__u32 *)(frame + 8));
	}
	if (version == 4) {
		struct iphdr *header = (void *)ip;
		hash = mix(header->saddr, header->daddr);
		protocol = header->protocol;
		whole = !(header->frag_off & bpf_htons(0x3fff));
		ports = ip + header->ihl * 4;
	} else {
		struct ipv6hdr *header = (void *)ip;
		__u32 *words = (void *)&header->saddr;
		for (int at = 0; at < 8; at++)
			hash = mix(hash, words[at]);
		protocol = header->nexthdr;
		ports = ip + sizeof(*header);
	}
	hash = mix(hash, protocol);
	if (whole && (protocol == IPPROTO_TCP || protocol == IPPROTO_UDP || protocol == IPPROTO_SCTP) &&
	    (void *)(ports + 4) <= end)
		hash = mix(hash, *(__u32 *)ports);
	return hash >> 16;
}

/* Sends a frame out of the interface of the port's tunnel, or says why not. */
static __always_inline enum reason leave(struct xdp_md *frame, __u32 number, __u64 bytes)
{
	void *data = (void *)(long)frame->data, *end = (void *)(long)frame->data_end;
	struct outside *outside = bpf_map_lookup_elem(&outsides, &number);
	__u32 ip_bytes, flow, headers_bytes;
	__u8 mark;

	if (!outside)
		return UNCONNECTED;
	if (!outside->mtu)
		return UNRESOLVED;
	headers_bytes = outside->headers_bytes;
	ip_bytes = bytes + headers_bytes - ETH_HLEN;
	if (ip_bytes > outside->mtu)
		return UNDERLAY_TOO_BIG;
	mark = mark_of(data, end);
	flow = outside->spread ? SPREAD_FIRST | (flow_of(data, end) & (0xffff - SPREAD_FIRST)) : 0;
	if (bpf_xdp_adjust_head(frame, -(int)headers_bytes))
		return UNDERLAY_TOO_BIG;
	data = (void *)(long)frame->data;
	end = (void *)(long)frame->data_end;
	if (data + HEADERS_BYTES_MAX > end)
		/* The shortest frame by the shortest tunnel has as many. */
		if (data + IPV4_BYTES + sizeof(struct udphdr) + ETH_HLEN > end)
			return RUNT;
#define WRITE(size) __builtin_memcpy(data, outside->headers, size)
	if (outside->sum) {
		struct iphdr *ip = data + ETH_HLEN;
		struct udphdr *udp = data + IPV4_BYTES;
		if (headers_bytes == IPV4_BYTES + sizeof(struct carried))
			WRITE(IPV4_BYTES + sizeof(struct carried));
		else
			WRITE(IPV4_BYTES + sizeof(struct udphdr));
		ip->tos = mark;
		ip->tot_len = bpf_htons(ip_bytes);
		ip->check = bpf_htons(~fold(outside->sum + mark + ip_bytes));
		udp->len = bpf_htons(ip_bytes - sizeof(*ip));
		if (flow)
			udp->source = bpf_htons(flow);
	} else {
		struct ipv6hdr *ip = data + ETH_HLEN;
		struct udphdr *udp = data + IPV6_BYTES;
		__u32 udp_bytes = ip_bytes - sizeof(*ip), sum;
		if (data + IPV6_BYTES + sizeof(struct udphdr) + ETH_HLEN > end)
			return RUNT;
		if (headers_bytes == HEADERS_BYTES_MAX)
			WRITE(HEADERS_BYTES_MAX);
		else
			WRITE(IPV6_BYTES + sizeof(struct udphdr));
		ip->flow_lbl[0] = mark << 4;
		ip->payload_len = bpf_htons(udp_bytes);
		udp->len = bpf_htons(udp_bytes);
		if (flow)
			udp->source = bpf_htons(flow);
		/* Receivers demand one (RFC 8200 section 8.1); 0 would be none. */
		sum = sum_of(udp, udp_bytes, end, pseudo_sum(&ip->saddr, 2 * sizeof(ip->saddr), udp_bytes));
		if (!sum)
			return UNDERLAY_TOO_BIG;
		udp->check = sum == 0xffff ? 0xffff : ~sum;
	}
	return bpf_redirect_map(&devices, number, XDP_ABORTED) == XDP_REDIRECT ? SENT : LINK_DOWN;
}

/* Sends a frame of `bytes` on its way that the vrouter gave to port `number`, or drops it. `noted`: there is a note
 * before it. */
static __always_inline int go(struct xdp_md *frame, __u32 number, __u64 bytes, const int noted)
{
	struct port_counts *counts = bpf_map_lookup_elem(&port_counts, &number), *there;
	struct port *port = bpf_map_lookup_elem(&ports, &number);
	enum reason reason;
	__u64 now_ns = 0;
	__u32 to, closed;
	int passes = 1;

	if (!counts || !port)
		return XDP_ABORTED;
	add(&counts->from_vrouter, bytes);
	if (bytes < ETH_HLEN)
		return drop(counts, RUNT);
	if (port->policed) {
		now_ns = bpf_ktime_get_ns();
		bpf_spin_lock(&port->lock);
		to = port->to;
		closed = port->closed;
		if (to && !closed)
			passes = take(&port->bytes, &port->frames, &port->taken_ns, now_ns,
				      bytes + port->overhead_bytes);
		bpf_spin_unlock(&port->lock);
	} else {
		to = port->to;
		closed = port->closed;
	}
	if (!to)
		return drop(counts, UNCONNECTED);
	if (closed)
		return drop(counts, LINK_DOWN);
	if (!passes)
		return drop(counts, POLICED);
	if (to == OUTSIDE) {
		if (noted)
			bpf_xdp_adjust_meta(frame, sizeof(struct note));
		reason = leave(frame, number, bytes);
		if (reason != SENT)
			return drop(counts, reason);
	} else {
		to -= 1;
		reason = deliver(frame, to, bytes, noted);
		if (reason != SENT && reason != POWER)
			return drop(counts, reason);
		there = bpf_map_lookup_elem(&port_counts, &to);
		if (there) {
			add(&there->from_link, bytes);
			if (reason == POWER)
				refuse(there, POWER);
		}
	}
	add(&counts->to_link, bytes);
	return reason == SENT ? XDP_REDIRECT : XDP_DROP;
}

SEC("xdp")
int pdp_out(struct xdp_md *frame)
{
	return go(frame, frame->ingress_ifindex - INDEX_FIRST, frame->data_end - frame->data, 0);
}

/* Charges the vrouter for what the thread that serves port has run since it was charged last. What it does for a frame
 * after this is charged with a later one, since the kernel counts at ticks, and when a thread sleeps. */
static __always_inline void charge(struct port *port, struct vrouter *vrouter, struct task_struct *task)
{
	__u64 ran_ns = task->se.sum_exec_runtime, used_ns, now;

	/* Nobody else writes these: a port has one queue. */
	if (port->ran_ns == ran_ns)
		return;
	used_ns = ran_ns - port->ran_ns;
	port->ran_ns = ran_ns;
	if (port->ran != port->thread) {
		/* How long it had run before is not known. */
		port->ran = port->thread;
		return;
	}
	/* More at once would not fit. */
	if (used_ns >> 32)
		used_ns = 0xffffffff;
	now = bpf_ktime_get_coarse_ns();
	bpf_spin_lock(&vrouter->lock);
	if (vrouter->scale) {
		if (vrouter->paid_ns < now)
			vrouter->paid_ns = now;
		vrouter->paid_ns += used_ns * vrouter->scale >> FRACTION_BITS;
	}
	bpf_spin_unlock(&vrouter->lock);
}

SEC("xdp")
int pdp_in(struct xdp_md *frame)
{
	struct note *note = (void *)(long)frame->data_meta;
	struct passage passage = {.frame = frame};
	struct port_counts *counts;
	__u32 number;
	enum way way;

	if ((void *)(note + 1) > (void *)(long)frame->data)
		return XDP_DROP;
	number = note->port;
	counts = bpf_map_lookup_elem(&port_counts, &number);
	passage.from = bpf_map_lookup_elem(&ports, &number);
	if (!counts || !passage.from)
		return XDP_DROP;
	number = passage.from->vrouter;
	passage.vrouter = bpf_map_lookup_elem(&vrouters, &number);
	if (!passage.vrouter)
		return XDP_DROP;
	if (passage.from->thread) {
		struct task_struct *task = (void *)bpf_get_current_task_btf();
		if (task->pid != passage.from->thread)
			return refuse(counts, UNPAID);
		charge(passage.from, passage.vrouter, task);
	}
	add(&counts->to_vrouter, frame->data_end - frame->data);
	passage.now = bpf_ktime_get_coarse_ns();
	if (can_ask())
		passage.device = ((struct xdp_buff *)bpf_cast_to_kern_ctx(frame))->rxq->dev;
	way = pass(&passage);
	if (way < WAYS)
		counts->ways[way] += 1;
	if (way == SHORT)
		return go(frame, passage.out, frame->data_end - frame->data, 1);
	bpf_xdp_adjust_meta(frame, sizeof(*note));
	return XDP_PASS;
}

/* What the kernel calls this: bpf_fib_lookup is for programs under the GPL. */
char LICENSE[] SEC("license") = "GPL";
