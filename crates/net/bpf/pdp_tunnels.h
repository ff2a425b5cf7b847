/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What comes by a tunnel for a kernel vrouter: the outer headers are looked at as the mux does
 * (crates/wire/src/outer.rs), and taken off. Known are VXLAN (RFC 7348) and Ethernet in UDP without any header
 * between, over IPv4 without options and IPv6 without extension headers. Everything else is not found here.
 */
#ifndef PDP_TUNNELS_H
#define PDP_TUNNELS_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>

#include "pdp_ports.h"

#define TUNNELS_MAX (2 * PORTS_MAX)
#define LIMITS_MAX 32768

#define DONT_FRAGMENT 0x4000
#define VXLAN_VALID 0x08
#define ECN_BITS 3
#define TAGS_MAX 2
#define PLAIN 0x100

/* In network byte order, and all of it counts: no tunnel is found by a part of it. */
struct tunnel {
	__u32 interface; /* index, in host byte order */
	__u32 kind; /* the version of IP, and PLAIN if nothing is between UDP and a frame; in host byte order */
	__be32 local[4]; /* IPv4: the first, the others 0 */
	__be32 remote[4];
	__be32 vni; /* of VXLAN; UDP: 0 */
	__be16 local_port;
	__be16 remote_port; /* of UDP; VXLAN: 0, as senders choose it by flow */
};

struct taker {
	__u32 port;
	__u32 limit; /* in `limits`, and 1; 0: none */
	__u8 mac[6]; /* whom frames are addressed to; all zero: whoever */
	__u16 reserved;
};

/* What may come, for all tunnels of a vnet together. */
struct limit {
	struct bpf_spin_lock lock;
	__u32 reserved;
	struct bucket bytes;
	struct bucket frames;
	__u64 taken_ns;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TUNNELS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct tunnel);
	__type(value, struct taker);
} tunnels SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIMITS_MAX);
	__type(key, __u32);
	__type(value, struct limit);
} limits SEC(".maps");

struct vxlan {
	__u8 flags;
	__u8 reserved[3];
	__be32 vni; /* in the upper three bytes */
};

/* What stands behind the outer IP header. */
struct carried {
	struct udphdr udp;
	struct vxlan vxlan;
};

#define IPV4_BYTES (sizeof(struct ethhdr) + sizeof(struct iphdr))
#define IPV6_BYTES (sizeof(struct ethhdr) + sizeof(struct ipv6hdr))
#define HEADERS_BYTES_MAX (IPV6_BYTES + sizeof(struct carried))

struct vlan {
	__be16 control;
	__be16 type;
};

/* The IP packet in a frame behind up to two tags, of at least its header's bytes, and its version; or 0. */
static __always_inline __u8 *packet_of(void *frame, void *end, int *version)
{
	struct ethhdr *ethernet = frame;
	__u8 *at = (void *)(ethernet + 1);
	__be16 type;

	if ((void *)at > end)
		return 0;
	type = ethernet->h_proto;
	for (int tags = 0; tags < TAGS_MAX; tags++) {
		struct vlan *tag = (void *)at;
		if (type != bpf_htons(ETH_P_8021Q) && type != bpf_htons(ETH_P_8021AD))
			break;
		at = (void *)(tag + 1);
		if ((void *)at > end)
			return 0;
		type = tag->type;
	}
	if (type == bpf_htons(ETH_P_IP)) {
		if ((void *)(at + sizeof(struct iphdr)) > end || at[0] >> 4 != 4)
			return 0;
		*version = 4;
		return at;
	}
	if (type == bpf_htons(ETH_P_IPV6)) {
		if ((void *)(at + sizeof(struct ipv6hdr)) > end || at[0] >> 4 != 6)
			return 0;
		*version = 6;
		return at;
	}
	return 0;
}

/* The ECN mark of a frame; 0 of one that is no IP. */
static __always_inline __u8 mark_of(void *frame, void *end)
{
	int version = 0;
	__u8 *ip = packet_of(frame, end, &version);

	if (!ip)
		return 0;
	return (version == 4 ? ip[1] : ip[1] >> 4) & ECN_BITS;
}

static __always_inline __u32 fold(__u32 sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* Brings the mark of the outer header into a frame (RFC 6040 section 4.2, crates/wire/src/ecn.rs). 0 if the frame
 * is to be dropped. */
static __always_inline int bring_mark(void *frame, void *end, __u8 outer)
{
	int version = 0;
	__u8 *ip, inner, mark;

	if (outer != 1 && outer != 3) /* ECT(1), CE */
		return 1;
	ip = packet_of(frame, end, &version);
	if (!ip)
		return 1;
	inner = (version == 4 ? ip[1] : ip[1] >> 4) & ECN_BITS;
	if (inner == 0)
		return outer != 3;
	if (outer == 3)
		mark = 3;
	else if (inner == 2)
		mark = 1;
	else
		return 1;
	if (version == 4) {
		struct iphdr *header = (void *)ip;
		/* RFC 1624 equation 3, of the word that has the mark. */
		__u32 sum = (__u16)~bpf_ntohs(header->check);
		sum += (__u16)~(ip[0] << 8 | ip[1]);
		ip[1] = (ip[1] & ~ECN_BITS) | mark;
		sum += ip[0] << 8 | ip[1];
		header->check = bpf_htons(~fold(sum));
	} else {
		ip[1] = (ip[1] & ~(ECN_BITS << 4)) | mark << 4;
	}
	return 1;
}

/* Adds to `sum` so many pieces of `size` bytes as there are in `left`, `most` at most. */
#define ADD(size, most) \
	for (int piece = 0; piece < (most) && left >= (size); piece++) { \
		if (at + (size) > end) \
			return 0; \
		sum = bpf_csum_diff(0, 0, at, size, sum); \
		at += (size); \
		left -= (size); \
	}

/* The sum of `left` bytes from `at`, 2,303 at most, and `sum`, folded; 0 if it can't be had. */
static __always_inline __u32 sum_of(void *at, __u32 left, void *end, __u32 sum)
{
	__u8 last[4] = {};

	ADD(256, 8)
	ADD(32, 7)
	ADD(4, 7)
	if (left >= sizeof(last))
		return 0;
	for (int byte = 0; byte < 3; byte++) {
		if (left <= (__u32)byte)
			break;
		if (at + 1 > end)
			return 0;
		last[byte] = *(__u8 *)at;
		at += 1;
	}
	sum = bpf_csum_diff(0, 0, (void *)last, sizeof(last), sum);
	return fold(sum);
}

/* What the UDP checksum has beside the datagram of `bytes`: addresses, `addresses_bytes` of both, and what it is. */
static __always_inline __u32 pseudo_sum(void *addresses, const __u32 addresses_bytes, __u32 bytes)
{
	__be16 last[2] = {bpf_htons(IPPROTO_UDP), bpf_htons(bytes)};

	return bpf_csum_diff(0, 0, (void *)last, sizeof(last),
			     bpf_csum_diff(0, 0, addresses, addresses_bytes, 0));
}

/* Gives a frame that came by a tunnel of a kernel vrouter to it. 0 if it did not. */
static __always_inline int arrive(struct xdp_md *frame)
{
	void *data = (void *)(long)frame->data, *end = (void *)(long)frame->data_end;
	__u32 carried_bytes, udp_bytes, headers_bytes, spare, number, pseudo;
	struct tunnel key = {.interface = frame->ingress_ifindex};
	struct ethhdr *ethernet = data;
	struct port_counts *counts;
	struct carried *carried;
	struct taker *taker = 0;
	enum reason reason;
	__u64 bytes, now_ns;
	int passes;
	__u8 mark;

	if ((void *)(ethernet + 1) > end)
		return 0;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = data + sizeof(*ethernet);
		carried = data + IPV4_BYTES;
		if ((void *)(carried + 1) > end || ip->version != 4 || ip->ihl != 5)
			return 0;
		if (ip->protocol != IPPROTO_UDP || ip->frag_off & bpf_htons(0x3fff))
			return 0;
		if (fold(bpf_csum_diff(0, 0, (void *)ip, sizeof(*ip), 0)) != 0xffff)
			return 0;
		if (bpf_ntohs(ip->tot_len) < sizeof(*ip))
			return 0;
		carried_bytes = bpf_ntohs(ip->tot_len) - sizeof(*ip);
		udp_bytes = bpf_ntohs(carried->udp.len);
		key.kind = 4;
		key.remote[0] = ip->saddr;
		key.local[0] = ip->daddr;
		pseudo = pseudo_sum(&ip->saddr, 2 * sizeof(ip->saddr), udp_bytes);
		headers_bytes = IPV4_BYTES;
		mark = ip->tos & ECN_BITS;
	} else if (ethernet->h_proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = data + sizeof(*ethernet);
		carried = data + IPV6_BYTES;
		if ((void *)(carried + 1) > end || ip->version != 6 || ip->nexthdr != IPPROTO_UDP)
			return 0;
		carried_bytes = bpf_ntohs(ip->payload_len);
		udp_bytes = bpf_ntohs(carried->udp.len);
		key.kind = 6;
		__builtin_memcpy(key.remote, &ip->saddr, sizeof(key.remote));
		__builtin_memcpy(key.local, &ip->daddr, sizeof(key.local));
		pseudo = pseudo_sum(&ip->saddr, 2 * sizeof(ip->saddr), udp_bytes);
		headers_bytes = IPV6_BYTES;
		mark = ip->flow_lbl[0] >> 4 & ECN_BITS;
	} else {
		return 0;
	}
	if (carried_bytes > end - (void *)carried || udp_bytes > carried_bytes)
		return 0;
	if (udp_bytes < sizeof(carried->udp))
		return 0;
	spare = end - (void *)carried - udp_bytes;
	key.local_port = carried->udp.dest;
	if (udp_bytes >= sizeof(*carried) && carried->vxlan.flags & VXLAN_VALID) {
		key.vni = carried->vxlan.vni & bpf_htonl(0xffffff00);
		taker = bpf_map_lookup_elem(&tunnels, &key);
		bytes = udp_bytes - sizeof(*carried);
	}
	if (taker) {
		headers_bytes += sizeof(*carried);
	} else {
		key.kind |= PLAIN;
		key.vni = 0;
		key.remote_port = carried->udp.source;
		taker = bpf_map_lookup_elem(&tunnels, &key);
		bytes = udp_bytes - sizeof(carried->udp);
		headers_bytes += sizeof(carried->udp);
	}
	if (!taker)
		return 0;
	/* None at all is right over IPv4, and over IPv6 for kinds whose RFC says so (RFC 6935): VXLAN alone. */
	if (carried->udp.check ? sum_of(carried, udp_bytes, end, pseudo) != 0xffff : key.kind == (6 | PLAIN))
		return 0;
	if (*(__u32 *)taker->mac | *(__u16 *)(taker->mac + 4)) {
		__u8 *to = ethernet->h_dest;
		if (*(__u32 *)taker->mac != *(__u32 *)to || *(__u16 *)(taker->mac + 4) != *(__u16 *)(to + 4))
			return 0;
	}
	number = taker->port;
	counts = bpf_map_lookup_elem(&port_counts, &number);
	if (!counts)
		return 0;
	add(&counts->from_link, bytes);
	if (bytes < ETH_HLEN)
		return refuse(counts, RUNT);
	if (taker->limit) {
		__u32 at = taker->limit - 1;
		struct limit *limit = bpf_map_lookup_elem(&limits, &at);
		if (limit && (limit->bytes.step || limit->frames.step)) {
			now_ns = bpf_ktime_get_ns();
			bpf_spin_lock(&limit->lock);
			passes = take(&limit->bytes, &limit->frames, &limit->taken_ns, now_ns, bytes);
			bpf_spin_unlock(&limit->lock);
			if (!passes)
				return refuse(counts, POLICED);
		}
	}
	/* Padding of a short frame. */
	if (spare && bpf_xdp_adjust_tail(frame, -(int)spare))
		return refuse(counts, RUNT);
	if (bpf_xdp_adjust_head(frame, headers_bytes))
		return refuse(counts, RUNT);
	if (!bring_mark((void *)(long)frame->data, (void *)(long)frame->data_end, mark))
		return refuse(counts, CONGESTED);
	reason = deliver(frame, number, bytes, 0);
	return reason == SENT ? XDP_REDIRECT : refuse(counts, reason);
}

#endif
