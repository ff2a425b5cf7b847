/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The short way through a vrouter: at the inner end of a port, frames that the namespace would only route are made
 * what it would make of them, as its tables say, and sent out of another port of the vrouter; all others pass to the
 * namespace's whole stack, unchanged.
 *
 * A frame goes the short way if all of this holds, and passes otherwise:
 *
 * - somebody said within the lease that nothing is in the way (`struct vrouter`, `aside` of ports);
 * - nothing that the kernel itself holds of the namespace and of both devices is in the way: netfilter hooks,
 *   tc, queueing disciplines, IPsec policies, devices over the port, reverse-path filters, and the like. This is
 *   read for each frame, so that a rule is obeyed from the command on that sets it; kernels before 6.2 can't be
 *   asked, and there `aside` is all there is;
 * - it is IPv4 without options or IPv6 without extension headers (encrypted payload excepted), whole, right in
 *   its lengths and checksum, of unicast addresses that nothing is special about, with a TTL that is left, to
 *   the link address of the port, and no error of ICMP, whose way may depend on what is inside;
 * - the kernel's look-up gives a plain unicast route out of another port of the vrouter, which is up and whose MTU
 *   holds it, and a neighbour that is known;
 * - the source (IPv4) is no address of the router: it is looked up as the kernel does when it validates one.
 *
 * The kernel keeps some hooks for as long as the namespace is there: of netfilter when a bridge was made in it once.
 *
 * The look-up follows rules and next-hop groups; ports go into it as the kernel's flow dissector finds them.
 * What it does not know is a route's MTU that is not locked: the lease has the smallest that there is.
 *
 * Names and layouts of the maps: src/ports/layout.rs.
 */
#ifndef PDP_SHORT_H
#define PDP_SHORT_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_endian.h>

#include "pdp_ports.h"

#define USED_BITS 14
#define USED_MAX (1 << USED_BITS)
#define AF_INET 2
#define AF_INET6 10
#define IPV4_FRAGMENT 0x3fff /* more fragments, or an offset (RFC 791 section 3.1) */
#define FLOW_INFORMATION 0x0fffffff /* traffic class and flow label (RFC 8200 section 3) */
#define USED_NS 250000000ull /* between two notes of one neighbour's use */
#define DEVICE_BUCKETS 256 /* NETDEV_HASHENTRIES of linux/net_namespace.h */
#define DEVICES_MAX 16 /* that are looked at in one of them */
#define RULES_MAX 16 /* of IPv6, that are looked at */
#define FORWARD_POLICY 2 /* XFRM_POLICY_FWD, XFRM_POLICY_OUT of linux/xfrm.h */
#define OUT_POLICY 1
#define POLICY_BLOCK 1 /* XFRM_USERPOLICY_BLOCK */
#define HOST_IDENTITY 139 /* next headers of IPv6 that <linux/in.h> lacks */
#define SHIM6 140
#define DEVICE_UP 1 /* IFF_UP of linux/if.h */
#define NO_CARRIER (1 << 2) /* __LINK_STATE_NOCARRIER of linux/netdevice.h, as a bit */

/* `aside` of a port. */
#define ASIDE_IN_V4 1
#define ASIDE_IN_V6 2
#define ASIDE_OUT_V4 4
#define ASIDE_OUT_V6 8

struct used {
	__u32 vrouter;
	__u32 ifindex;
	__u32 family; /* 0: nothing here */
	__u32 reserved;
	__u32 address[4]; /* IPv4: the first */
	__u64 ns;
};

/* By the namespace itself, so that no frame leaves by another's port whatever slots they have. */
struct inner {
	__u32 netns;
	__u32 ifindex;
};

/* Numbers of ports by their inner ends. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, PORTS_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, struct inner);
	__type(value, __u32);
} inners SEC(".maps");

/* Neighbours that frames were sent to, as far as there is room: two in one place take turns. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, USED_MAX);
	__type(key, __u32);
	__type(value, struct used);
} used SEC(".maps");

/* What is known of a frame on its way through. */
struct passage {
	struct xdp_md *frame;
	struct vrouter *vrouter;
	struct port *from;
	struct net_device *device; /* that it came in by; 0: the kernel can't be asked */
	__u32 out; /* number of the port that it goes out by */
	__u64 now;
};

/* Of the kernel's structures: what is read, found where it is when the program is loaded. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct list_head {
	struct list_head *next;
};
struct hlist_node {
	struct hlist_node *next;
};
struct hlist_head {
	struct hlist_node *first;
};
struct ipv4_devconf {
	int data[IPV4_DEVCONF_MAX];
};
struct in_device {
	struct ipv4_devconf cnf;
};
struct ipv6_devconf {
	int forwarding;
	int disable_ipv6;
	int proxy_ndp;
};
struct inet6_dev {
	struct ipv6_devconf cnf;
};
struct netns_ipv4 {
	struct ipv4_devconf *devconf_all;
	__u8 sysctl_fib_multipath_hash_policy;
};
struct netns_sysctl_ipv6 {
	__u8 multipath_hash_policy;
};
struct fib_rule {
	struct list_head list;
	int suppress_ifgroup;
	int suppress_prefixlen;
};
struct fib_rules_ops {
	struct list_head rules_list;
};
struct netns_ipv6 {
	struct fib_rules_ops *fib6_rules_ops;
	struct netns_sysctl_ipv6 sysctl;
	struct ipv6_devconf *devconf_all;
	_Bool fib6_has_custom_rules;
};
struct netns_nf {
	void *hooks_ipv4[5];
	void *hooks_ipv6[5];
};
struct netns_xfrm {
	unsigned int policy_count[6];
	__u8 policy_default[3];
};
struct net {
	struct hlist_head *dev_index_head;
	struct netns_ipv4 ipv4;
	struct netns_ipv6 ipv6;
	struct netns_nf nf;
	struct netns_xfrm xfrm;
};
struct Qdisc {
	__u32 handle;
};
struct net_device {
	unsigned int mtu;
	unsigned int flags;
	unsigned long state;
	int ifindex;
	const unsigned char *dev_addr;
	void *rx_handler;
	void *nf_hooks_ingress;
	void *nf_hooks_egress;
	void *tcx_ingress;
	void *tcx_egress;
	void *miniq_ingress;
	void *miniq_egress;
	struct Qdisc *qdisc;
	struct in_device *ip_ptr;
	struct inet6_dev *ip6_ptr;
	struct hlist_node index_hlist;
	struct {
		struct net *net;
	} nd_net;
	struct {
		struct list_head upper;
	} adj_list;
};
struct sched_entity {
	__u64 sum_exec_runtime;
};
struct task_struct {
	__u32 pid;
	struct sched_entity se;
};
struct xdp_rxq_info {
	struct net_device *dev;
};
struct xdp_buff {
	struct xdp_rxq_info *rxq;
};
#pragma clang attribute pop

extern void *bpf_cast_to_kern_ctx(void *context) __ksym __weak;
extern void *bpf_rdonly_cast(const void *object, __u32 type) __ksym __weak;

/* Hooks of netfilter that forwarded packets come by (linux/netfilter.h). */
#define NF_INET_PRE_ROUTING 0
#define NF_INET_FORWARD 2
#define NF_INET_POST_ROUTING 4

static __always_inline int can_ask(void)
{
	return bpf_cast_to_kern_ctx && bpf_rdonly_cast;
}

/* Whether a rule of IPv6 suppresses results, which the look-up knows nothing of; or there are many. */
static __always_inline int is_suppressed(struct net *net)
{
	struct fib_rules_ops *all = net->ipv6.fib6_rules_ops;
	struct list_head *at;

	/* Set by the first rule, and never taken back. */
	if (!net->ipv6.fib6_has_custom_rules)
		return 0;
	at = all->rules_list.next;
	for (int looked = 0; looked < RULES_MAX; looked++) {
		struct fib_rule *rule =
			bpf_rdonly_cast((void *)at - bpf_core_field_offset(struct fib_rule, list),
					bpf_core_type_id_kernel(struct fib_rule));
		if ((void *)at == (void *)&all->rules_list)
			return 0;
		if (rule->suppress_ifgroup != -1 || rule->suppress_prefixlen != -1)
			return 1;
		at = rule->list.next;
	}
	return 1;
}

/* Whether something is in the way of what comes in by a device. */
static __always_inline int is_hooked_in(struct net_device *device, int v6)
{
	struct net *net = device->nd_net.net;

	if (device->rx_handler)
		return 1;
	/* A bridge, a VRF, a VLAN or a macvlan. */
	if ((void *)device->adj_list.upper.next != (void *)&device->adj_list.upper)
		return 1;
	if (bpf_core_field_exists(device->nf_hooks_ingress) && device->nf_hooks_ingress)
		return 1;
	if (bpf_core_field_exists(device->tcx_ingress) && device->tcx_ingress)
		return 1;
	if (bpf_core_field_exists(device->miniq_ingress) && device->miniq_ingress)
		return 1;
	if (bpf_core_field_exists(net->xfrm)) {
		if (net->xfrm.policy_count[FORWARD_POLICY] || net->xfrm.policy_count[OUT_POLICY])
			return 1;
		if (bpf_core_field_exists(net->xfrm.policy_default) &&
		    (net->xfrm.policy_default[FORWARD_POLICY] == POLICY_BLOCK ||
		     net->xfrm.policy_default[OUT_POLICY] == POLICY_BLOCK))
			return 1;
	}
	if (v6) {
		struct inet6_dev *own = device->ip6_ptr;
		struct ipv6_devconf *all = net->ipv6.devconf_all;

		if (bpf_core_field_exists(net->nf.hooks_ipv6) &&
		    (net->nf.hooks_ipv6[NF_INET_PRE_ROUTING] || net->nf.hooks_ipv6[NF_INET_FORWARD] ||
		     net->nf.hooks_ipv6[NF_INET_POST_ROUTING]))
			return 1;
		/* Other hash policies look inside. */
		if (is_suppressed(net) || net->ipv6.sysctl.multipath_hash_policy > 1)
			return 1;
		return own->cnf.disable_ipv6 || !all->forwarding || all->proxy_ndp;
	} else {
		struct in_device *own = device->ip_ptr;
		struct ipv4_devconf *all = net->ipv4.devconf_all;

		if (bpf_core_field_exists(net->nf.hooks_ipv4) &&
		    (net->nf.hooks_ipv4[NF_INET_PRE_ROUTING] || net->nf.hooks_ipv4[NF_INET_FORWARD] ||
		     net->nf.hooks_ipv4[NF_INET_POST_ROUTING]))
			return 1;
		/* Redirects that are heeded lead elsewhere than the look-up. */
		return all->data[IPV4_DEVCONF_RP_FILTER - 1] || own->cnf.data[IPV4_DEVCONF_RP_FILTER - 1] ||
		       all->data[IPV4_DEVCONF_ACCEPT_REDIRECTS - 1] ||
		       net->ipv4.sysctl_fib_multipath_hash_policy > 1;
	}
}

/* The device of an index in the namespace of another. */
static __always_inline struct net_device *device_of(struct net_device *other, __u32 ifindex)
{
	struct net *net = other->nd_net.net;
	__u64 bucket = (__u64)net->dev_index_head +
		       (ifindex & (DEVICE_BUCKETS - 1)) * sizeof(struct hlist_head);
	struct hlist_head *head =
		bpf_rdonly_cast((void *)bucket, bpf_core_type_id_kernel(struct hlist_head));
	struct hlist_node *node = head->first;

	for (int looked = 0; looked < DEVICES_MAX && node; looked++) {
		struct net_device *device =
			bpf_rdonly_cast((void *)node - bpf_core_field_offset(struct net_device, index_hlist),
					bpf_core_type_id_kernel(struct net_device));
		if (device->ifindex == ifindex)
			return device;
		node = node->next;
	}
	return 0;
}

/* Whether something is in the way of what goes out by a device. */
static __always_inline int is_hooked_out(struct net_device *device, int v6)
{
	/* What the kernel puts there by itself has no handle. */
	if (device->qdisc->handle)
		return 1;
	if (bpf_core_field_exists(device->nf_hooks_egress) && device->nf_hooks_egress)
		return 1;
	if (bpf_core_field_exists(device->tcx_egress) && device->tcx_egress)
		return 1;
	if (bpf_core_field_exists(device->miniq_egress) && device->miniq_egress)
		return 1;
	if (v6) {
		struct inet6_dev *own = device->ip6_ptr;
		/* Who does not forward may heed redirects. */
		return own->cnf.disable_ipv6 || !own->cnf.forwarding;
	}
	return 0;
}

/* Whether a frame is for the link address of the port that it came in by. */
static __always_inline int is_for_port(struct ethhdr *ethernet, const struct passage *it)
{
	const __u16 *to = (const void *)ethernet->h_dest;
	__u16 mac[3];

	if (!it->device)
		__builtin_memcpy(mac, it->from->mac, sizeof(mac));
	else if (bpf_probe_read_kernel(mac, sizeof(mac), it->device->dev_addr))
		return 0;
	return to[0] == mac[0] && to[1] == mac[1] && to[2] == mac[2];
}

/* Ports as the kernel's flow dissector finds them: the first four bytes of what has some. */
static __always_inline int ports_of(struct bpf_fib_lookup *to, __be16 *carried, __u32 bytes, void *end)
{
	switch (to->l4_protocol) {
	case IPPROTO_TCP:
	case IPPROTO_UDP:
	case IPPROTO_UDPLITE:
	case IPPROTO_SCTP:
	case IPPROTO_DCCP:
	case IPPROTO_ESP:
		if (bytes < 4 || (void *)(carried + 2) > end)
			return -1;
		to->sport = carried[0];
		to->dport = carried[1];
	}
	return 0;
}

/* Notes that a neighbour is used; `to` is what the look-up made of it. */
static __always_inline void note_use(__u32 vrouter, const struct bpf_fib_lookup *to, __u64 now)
{
	__u32 hash = to->ipv6_dst[0] ^ to->ifindex ^ vrouter << 16;
	struct used *it;

	if (to->family == AF_INET6)
		hash ^= to->ipv6_dst[1] ^ to->ipv6_dst[2] ^ to->ipv6_dst[3];
	hash = hash * 0x9e3779b1u >> (32 - USED_BITS);
	it = bpf_map_lookup_elem(&used, &hash);
	if (!it)
		return;
	if (it->ns + USED_NS > now && it->address[0] == to->ipv6_dst[0] &&
	    it->address[3] == to->ipv6_dst[3] && it->ifindex == to->ifindex && it->vrouter == vrouter)
		return;
	it->vrouter = vrouter;
	it->ifindex = to->ifindex;
	it->family = to->family;
	it->address[0] = to->ipv6_dst[0];
	it->address[1] = to->ipv6_dst[1];
	it->address[2] = to->ipv6_dst[2];
	it->address[3] = to->ipv6_dst[3];
	it->ns = now;
}

/* Looks where a packet would go, and makes the frame what the kernel would send there. */
static __always_inline enum way find(struct passage *it, struct bpf_fib_lookup *to, __u32 bytes)
{
	int v6 = to->family == AF_INET6;
	struct bpf_fib_lookup back = {.family = AF_INET, .l4_protocol = to->l4_protocol};
	struct inner key = {.netns = it->from->netns};
	struct xdp_md *frame = it->frame;
	struct port *out;
	__u32 *number;
	void *data, *end;
	struct ethhdr *ethernet;
	long found;

	if (!v6) {
		back.tos = to->tos;
		back.sport = to->dport;
		back.dport = to->sport;
		back.ipv4_dst = to->ipv4_src;
		back.ipv4_src = to->ipv4_dst;
	}
	found = bpf_fib_lookup(frame, to, sizeof(*to), 0);
	if (found == BPF_FIB_LKUP_RET_FRAG_NEEDED)
		return BEYOND_MTU;
	if (found == BPF_FIB_LKUP_RET_NO_NEIGH)
		return NEIGHBOUR;
	if (found != BPF_FIB_LKUP_RET_SUCCESS || to->ifindex == frame->ingress_ifindex)
		return ROUTE;
	key.ifindex = to->ifindex;
	number = bpf_map_lookup_elem(&inners, &key);
	if (!number)
		return ROUTE;
	it->out = *number;
	out = bpf_map_lookup_elem(&ports, &it->out);
	/* The kernel takes the root end out when the pair goes: another device may have the index then. */
	if (!out || out->inner != to->ifindex || !bpf_map_lookup_elem(&ends, &it->out))
		return ROUTE;
	if (out->aside & (v6 ? ASIDE_OUT_V6 : ASIDE_OUT_V4))
		return HOOKED;
	if (it->device) {
		struct net_device *device = device_of(it->device, to->ifindex);
		if (!device)
			return ROUTE;
		/* The look-up does not ask for that. */
		if (!(device->flags & DEVICE_UP) || device->state & NO_CARRIER)
			return ROUTE;
		if (is_hooked_out(device, v6))
			return HOOKED;
		if (bytes > device->mtu)
			return BEYOND_MTU;
	}
	if (!v6) {
		/* As the kernel validates a source, with rules and the like: as an answer from there. */
		back.ifindex = to->ifindex;
		found = bpf_fib_lookup(frame, &back, sizeof(back), 0);
		if (found != BPF_FIB_LKUP_RET_SUCCESS && found != BPF_FIB_LKUP_RET_NO_NEIGH)
			return SOURCE;
	}
	/* Nothing has been changed so far. */
	bytes += sizeof(*ethernet);
	found = frame->data_end - frame->data;
	if (found > bytes && bpf_xdp_adjust_tail(frame, (int)bytes - (int)found))
		return SPECIAL;
	data = (void *)(long)frame->data;
	end = (void *)(long)frame->data_end;
	ethernet = data;
	if (v6) {
		struct ipv6hdr *ip = (void *)(ethernet + 1);
		if ((void *)(ip + 1) > end)
			return SPECIAL;
		ip->hop_limit--;
	} else {
		struct iphdr *ip = (void *)(ethernet + 1);
		__u32 sum;
		if ((void *)(ip + 1) > end)
			return SPECIAL;
		/* As ip_decrease_ttl() of the kernel: of the two forms of zero the same one. */
		sum = ip->check + (__u32)bpf_htons(0x0100);
		ip->check = sum + (sum >= 0xffff);
		ip->ttl--;
	}
	__builtin_memcpy(ethernet->h_dest, to->dmac, ETH_ALEN);
	__builtin_memcpy(ethernet->h_source, to->smac, ETH_ALEN);
	note_use(it->from->vrouter, to, it->now);
	return SHORT;
}

static __always_inline int is_right(const struct iphdr *ip)
{
	const __u16 *word = (const void *)ip;
	__u32 sum = 0;

#pragma unroll
	for (int at = 0; at < 10; at++)
		sum += word[at];
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return sum == 0xffff;
}

/* Nothing is special about it: not of this network, the machine, a group, or reserved (RFC 6890). */
static __always_inline int is_plain_v4(__be32 address)
{
	__u8 first = bpf_ntohl(address) >> 24;

	return first != 0 && first != 127 && first < 224;
}

/* Global unicast as it is given out, and unique local (RFC 4291 section 2.5.4, RFC 4193). */
static __always_inline int is_plain_v6(const struct in6_addr *address)
{
	__u8 first = address->s6_addr[0];

	return (first & 0xe0) == 0x20 || (first & 0xfe) == 0xfc;
}

static __always_inline enum way v4(struct passage *it)
{
	void *data = (void *)(long)it->frame->data, *end = (void *)(long)it->frame->data_end;
	struct iphdr *ip = data + sizeof(struct ethhdr);
	struct bpf_fib_lookup to = {.family = AF_INET, .ifindex = it->frame->ingress_ifindex};
	__u32 bytes;

	if ((void *)(ip + 1) > end || ip->version != 4 || ip->ihl != 5)
		return SPECIAL;
	bytes = bpf_ntohs(ip->tot_len);
	if (bytes < sizeof(*ip) || bytes > end - (void *)ip)
		return SPECIAL;
	if (ip->frag_off & bpf_htons(IPV4_FRAGMENT) || ip->ttl <= 1)
		return SPECIAL;
	if (!is_plain_v4(ip->saddr) || !is_plain_v4(ip->daddr) || !is_right(ip))
		return SPECIAL;
	to.l4_protocol = ip->protocol;
	if (ip->protocol == IPPROTO_ICMP) {
		__u8 *type = (void *)(ip + 1);
		if (bytes < sizeof(*ip) + 1 || (void *)(type + 1) > end)
			return SPECIAL;
		switch (*type) {
		case 3: /* unreachable, source quench, redirect, time exceeded, parameter problem */
		case 4: /* (RFC 792) */
		case 5:
		case 11:
		case 12:
			return SPECIAL;
		}
	} else if (ip->protocol == IPPROTO_AH) {
		return SPECIAL;
	}
	if (ports_of(&to, (void *)(ip + 1), bytes - sizeof(*ip), end))
		return SPECIAL;
	if (it->vrouter->until_ns <= it->now)
		return SILENT;
	if (it->from->aside & ASIDE_IN_V4 || (it->device && is_hooked_in(it->device, 0)))
		return HOOKED;
	if (bytes > it->vrouter->bytes_max[0])
		return BEYOND_MTU;
	to.tot_len = bytes;
	to.tos = ip->tos;
	to.ipv4_src = ip->saddr;
	to.ipv4_dst = ip->daddr;
	return find(it, &to, bytes);
}

static __always_inline enum way v6(struct passage *it)
{
	void *data = (void *)(long)it->frame->data, *end = (void *)(long)it->frame->data_end;
	struct ipv6hdr *ip = data + sizeof(struct ethhdr);
	struct bpf_fib_lookup to = {.family = AF_INET6, .ifindex = it->frame->ingress_ifindex};
	__u32 bytes;

	if ((void *)(ip + 1) > end || ip->version != 6)
		return SPECIAL;
	bytes = bpf_ntohs(ip->payload_len) + sizeof(*ip);
	if (bytes > end - (void *)ip || ip->hop_limit <= 1)
		return SPECIAL;
	if (!is_plain_v6(&ip->saddr) || !is_plain_v6(&ip->daddr))
		return SPECIAL;
	to.l4_protocol = ip->nexthdr;
	switch (ip->nexthdr) {
	case IPPROTO_HOPOPTS:
	case IPPROTO_ROUTING:
	case IPPROTO_FRAGMENT:
	case IPPROTO_DSTOPTS:
	case IPPROTO_AH:
	case IPPROTO_MH:
	case HOST_IDENTITY:
	case SHIM6:
		return SPECIAL;
	case IPPROTO_ICMPV6: {
		__u8 *type = (void *)(ip + 1);
		/* Errors (RFC 4443 section 2.1). */
		if (bytes < sizeof(*ip) + 1 || (void *)(type + 1) > end || *type < 128)
			return SPECIAL;
	}
	}
	if (ports_of(&to, (void *)(ip + 1), bytes - sizeof(*ip), end))
		return SPECIAL;
	if (it->vrouter->until_ns <= it->now)
		return SILENT;
	if (it->from->aside & ASIDE_IN_V6 || (it->device && is_hooked_in(it->device, 1)))
		return HOOKED;
	if (bytes > it->vrouter->bytes_max[1])
		return BEYOND_MTU;
	to.tot_len = bytes;
	to.flowinfo = *(__be32 *)ip & bpf_htonl(FLOW_INFORMATION);
	__builtin_memcpy(to.ipv6_src, &ip->saddr, sizeof(to.ipv6_src));
	__builtin_memcpy(to.ipv6_dst, &ip->daddr, sizeof(to.ipv6_dst));
	return find(it, &to, bytes);
}

/* What becomes of a frame that is given to a vrouter. If it is to go the short way, it is what is to be sent, and
 * `out` of `it` is the port. */
static __always_inline enum way pass(struct passage *it)
{
	struct ethhdr *ethernet = (void *)(long)it->frame->data;

	if ((void *)(ethernet + 1) > (void *)(long)it->frame->data_end || !is_for_port(ethernet, it))
		return SPECIAL;
	if (ethernet->h_proto == bpf_htons(ETH_P_IP))
		return v4(it);
	if (ethernet->h_proto == bpf_htons(ETH_P_IPV6))
		return v6(it);
	return SPECIAL;
}

#endif
