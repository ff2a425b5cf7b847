// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * Gives frames that belong to PdP to the AF_XDP socket of their receive queue and all others to
 * the kernel, so that an interface shared with the host stays reachable. For packet sockets two
 * programs do the same: one says which frames a socket gets, the other, which runs after packet
 * sockets have seen a frame, ends those for the kernel.
 *
 * Of what is taken, frames of kernel vrouters' tunnels go to their ports (pdp_tunnels.h).
 *
 * Taken are: everything, if the settings say so; else what is in `takes`: UDP to an address and port and
 * Ethernet in GRE to an address, over IPv4 or IPv6 without VLAN tags, and VLANs (802.1Q, the outermost
 * tag). Fragments are left to the kernel, whose reassembly sees all of a datagram or nothing of it; so are
 * IPv6 packets with extension headers, but for 8 bytes of destination options before GRE, which Linux's
 * ip6gretap sends.
 *
 * Names and layouts of the maps: src/xdp.rs.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "pdp_tunnels.h"

#define QUEUES_MAX 64
#define TAKES_MAX 65536
#define HEADERS_BYTES 82 /* Ethernet, IPv4 with all options, UDP; all others are shorter */
#define IPV4_FRAGMENT 0x3fff /* more fragments, or an offset (RFC 791 section 3.1) */

struct take {
	__u8 address[16]; /* IPv4: the first four bytes, the others zero */
	__be16 number; /* UDP port, or VLAN */
	__u16 kind; /* 4 or 6, the version of IP; and one of these, or neither: UDP */
};

#define TAKE_GRE 0x100
#define TAKE_VLAN 0x200

#define OPTIONS_BYTES 8
#define VLAN_ID 0x0fff

struct tag {
	__be16 control;
	__be16 type; /* of what follows */
};

struct gre {
	__be16 flags;
	__be16 type;
};

struct settings {
	__u32 take_all;
	__u32 filtered; /* interface that pdp_tc is on; 0: none */
};

enum counter { TAKEN, NO_SOCKET, PASSED, COUNTERS };

struct {
	__uint(type, BPF_MAP_TYPE_XSKMAP);
	__uint(max_entries, QUEUES_MAX);
	__type(key, __u32);
	__type(value, __u32);
} sockets SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, TAKES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct take);
	__type(value, __u8);
} takes SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct settings);
} settings SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTERS);
	__type(key, __u32);
	__type(value, __u64);
} counters SEC(".maps");

static __always_inline int count(__u32 counter, int action)
{
	__u64 *value = bpf_map_lookup_elem(&counters, &counter);
	if (value)
		*value += 1;
	return action;
}

static __always_inline int is_vlan_taken(__u16 control)
{
	struct take key = {.number = bpf_htons(control & VLAN_ID), .kind = TAKE_VLAN};

	return bpf_map_lookup_elem(&takes, &key) != 0;
}

/* Whether the frame is in `takes`. */
static __always_inline int is_taken(void *data, void *end)
{
	struct take key = {};
	struct ethhdr *ethernet = data;
	__u8 protocol;
	void *carried;

	if ((void *)(ethernet + 1) > end)
		return 0;
	if (ethernet->h_proto == bpf_htons(ETH_P_8021Q)) {
		struct tag *tag = (void *)(ethernet + 1);
		if ((void *)(tag + 1) > end)
			return 0;
		return is_vlan_taken(bpf_ntohs(tag->control));
	} else if (ethernet->h_proto == bpf_htons(ETH_P_IP)) {
		struct iphdr *ip = (void *)(ethernet + 1);
		if ((void *)(ip + 1) > end)
			return 0;
		if (ip->version != 4 || ip->ihl < 5)
			return 0;
		if (ip->frag_off & bpf_htons(IPV4_FRAGMENT))
			return 0;
		protocol = ip->protocol;
		carried = (void *)ip + ip->ihl * 4;
		__builtin_memcpy(key.address, &ip->daddr, 4);
		key.kind = 4;
	} else if (ethernet->h_proto == bpf_htons(ETH_P_IPV6)) {
		struct ipv6hdr *ip = (void *)(ethernet + 1);
		if ((void *)(ip + 1) > end)
			return 0;
		if (ip->version != 6)
			return 0;
		protocol = ip->nexthdr;
		carried = (void *)(ip + 1);
		if (protocol == IPPROTO_DSTOPTS) {
			struct ipv6_opt_hdr *options = carried;
			carried += OPTIONS_BYTES;
			if (carried > end || options->hdrlen != 0)
				return 0;
			if (options->nexthdr != IPPROTO_GRE)
				return 0;
			protocol = IPPROTO_GRE;
		}
		__builtin_memcpy(key.address, &ip->daddr, 16);
		key.kind = 6;
	} else {
		return 0;
	}
	if (protocol == IPPROTO_UDP) {
		struct udphdr *udp = carried;
		if ((void *)(udp + 1) > end)
			return 0;
		key.number = udp->dest;
	} else if (protocol == IPPROTO_GRE) {
		struct gre *gre = carried;
		if ((void *)(gre + 1) > end || gre->type != bpf_htons(ETH_P_TEB))
			return 0;
		key.kind |= TAKE_GRE;
	} else {
		return 0;
	}
	return bpf_map_lookup_elem(&takes, &key) != 0;
}

SEC("xdp")
int pdp_xdp(struct xdp_md *context)
{
	void *data = (void *)(long)context->data;
	void *end = (void *)(long)context->data_end;
	__u32 zero = 0;
	struct settings *now = bpf_map_lookup_elem(&settings, &zero);
	long action;

	if (!(now && now->take_all) && !is_taken(data, end))
		return count(PASSED, XDP_PASS);
	action = arrive(context);
	if (action)
		return action;
	/* The last argument is what is returned if the queue has no socket. */
	action = bpf_redirect_map(&sockets, context->rx_queue_index, XDP_PASS);
	return count(action == XDP_REDIRECT ? TAKEN : NO_SOCKET, action);
}

/* As is_taken, of a frame in the stack, where the kernel has taken its VLAN tag off. */
static __always_inline int is_ours(struct __sk_buff *frame)
{
	/* Two bytes, so that what is behind an Ethernet header is aligned. */
	__u8 aligned[2 + HEADERS_BYTES] __attribute__((aligned(8))) = {};
	__u8 *headers = aligned + 2;
	__u64 bytes = frame->len; /* in one register, whose bounds the verifier knows */
	__u32 zero = 0;
	struct settings *now = bpf_map_lookup_elem(&settings, &zero);

	if (now && now->take_all)
		return 1;
	if (bytes > HEADERS_BYTES)
		bytes = HEADERS_BYTES;
	if (frame->vlan_present)
		return frame->vlan_proto == bpf_htons(ETH_P_8021Q) && is_vlan_taken(frame->vlan_tci);
	if (bytes < sizeof(struct ethhdr))
		return 0;
	if (bpf_skb_load_bytes(frame, 0, headers, bytes))
		return 0;
	return is_taken(headers, headers + bytes);
}

SEC("socket")
int pdp_socket(struct __sk_buff *frame)
{
	return is_ours(frame) ? -1 : 0; /* bytes of it that the socket gets */
}

SEC("tc")
int pdp_tc(struct __sk_buff *frame)
{
	return is_ours(frame) ? count(TAKEN, TC_ACT_STOLEN) : count(PASSED, TC_ACT_UNSPEC);
}

/* The kernel knows no word for "GPL-2.0 OR Apache-2.0"; the program calls no GPL-only helper, and
 * this is what it may be taken as. */
char LICENSE[] SEC("license") = "GPL";
