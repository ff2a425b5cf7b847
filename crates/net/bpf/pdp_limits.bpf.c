// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * Bounds requests of guests for what all network namespaces share: time under the kernel's lock for changes of
 * interfaces and addresses (RTNL), and memory that no cgroup is charged for.
 *
 * The programs know a guest by its user id: each vnet has a range of ids. Requests of all other users pass at once.
 * The kind of a request says how long it holds the lock. Most requests hold it for less than 0.25 ms; deleting or
 * moving an interface takes about 20 ms. A change of one interface may also change the VLANs above it and the ports of
 * a bridge, and may have the kernel walk all routes of the namespace.
 *
 * An owner (a tenant, or a network of the operators') gets 1/`parts` of RTNL time; pdpd writes `parts`. It can save up
 * BURST_NS. New routes, deleted routes and new next hops are free: each holds the lock for some microseconds, and the
 * kernel charges their memory to the guest's cgroup. A router installs 100,000 of them in a second.
 *
 * Layouts: src/limits.rs.
 */
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_tracing.h>

#define RANGES_MAX 8192
#define USERS_BITS 16 /* of a range */

#define MSEC 1000000ull
#define SEC_NS 1000000000ull

/* Time under the lock. */
#define LIGHT_NS (MSEC / 4)
#define CALL_NS (2 * MSEC) /* of ethtool and the like, which is not looked into */
#define HEAVY_NS (20 * MSEC)
#define BURST_NS (64 * HEAVY_NS)
#define UPPER_NS (LIGHT_NS / 8) /* one VLAN or bridge port that follows a change of its interface */
#define ROUTE4_NS 70 /* one route, when the kernel walks all of a namespace's */
#define ROUTE6_NS 350

/* Entries of tables that nobody is charged for. */
#define ENTRY_NS SEC_NS
#define ENTRIES_BURST 32768ull

/* Messages of one call; the kernel's buffer of a socket has room for no more of 16 bytes. */
#define MESSAGES_MAX 65536
/* The program reads so many attributes of a message that sets an interface. It takes longer messages for heavy. */
#define ATTRIBUTES_MAX 12

#define EAGAIN 11
#define ENOSPC 28
#define EMSGSIZE 90

#define AF_BRIDGE 7
#define NETLINK_ROUTE 0
#define NETLINK_NETFILTER 12
#define NETLINK_GENERIC 16
#define GENERIC_CONTROL 16

#define NLM_F_CREATE 0x400
#define RTM_NEWLINK 16
#define RTM_DELLINK 17
#define RTM_SETLINK 19
#define RTM_DELADDR 21
#define RTM_NEWROUTE 24
#define RTM_DELROUTE 25
#define RTM_NEWNEIGH 28
#define RTM_DELNEIGH 29
#define RTM_NEWQDISC 36
#define RTM_DELQDISC 37
#define RTM_NEWNEXTHOP 104
#define RTM_DELNEXTHOP 105
#define RTM_NEWVLAN 112
#define RTM_DELVLAN 113
#define RTM_NEWTUNNEL 120
#define RTM_DELTUNNEL 121
#define IFLA_GROUP 27
#define CTNETLINK_NEW 0x100
#define CTNETLINK_EXP_NEW 0x200
#define FAMILY_AT 16
#define INDEX_AT 20 /* ifi_index */
#define LINK_HEADER 32 /* nlmsghdr and ifinfomsg */
#define VLAN_MESSAGE 48 /* longest message of `bridge vlan add` with one VLAN, and no range */
#define VLAN_RANGE 16 /* bytes of one more range */

#define TUNSETIFF 0x400454ca
#define SIOC 0x89 /* the upper bits of those of sockets, linux/sockios.h */

#define FOLLOWED __attribute__((preserve_access_index))

struct list_head {
	struct list_head *next;
} FOLLOWED;

struct netns_ipv4 {
	unsigned int fib_seq;
} FOLLOWED;

struct rt6_statistics {
	__u32 fib_rt_entries;
} FOLLOWED;

struct netns_ipv6 {
	struct rt6_statistics *rt6_stats;
} FOLLOWED;

struct net {
	struct list_head dev_base_head;
	struct netns_ipv4 ipv4;
	struct netns_ipv6 ipv6;
} FOLLOWED;

struct sock_common {
	struct {
		struct net *net;
	} skc_net;
} FOLLOWED;

struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
} FOLLOWED;

struct socket {
	struct sock *sk;
} FOLLOWED;

struct sk_buff {
	unsigned int len;
	unsigned char *data;
} FOLLOWED;

struct nsproxy {
	struct net *net_ns;
} FOLLOWED;

struct task_struct {
	struct nsproxy *nsproxy;
} FOLLOWED;

struct file;

struct header {
	__u32 length;
	__u16 type;
	__u16 flags;
};

struct owner {
	struct bpf_spin_lock lock;
	__u32 reserved;
	__u64 busy_ns; /* time under the lock that it had in advance */
	__u64 entries_ns; /* time after which it has all its entries again */
	__u64 at_ns; /* when these were so */
};

struct settings {
	__u64 parts; /* an owner gets 1/parts of RTNL time */
	__u32 links_max; /* interfaces of a namespace */
	__u32 reserved;
};

/* Owners by the upper bits of their guests' user ids. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, RANGES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u32);
	__type(value, __u64);
} ranges SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, RANGES_MAX);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, __u64);
	__type(value, struct owner);
} owners SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct settings);
} settings SEC(".maps");

/*
 * Zeroes what a function of bpf_loop changes: the kernel fills it with zeros after it has failed to read address 0.
 *
 * The verifier must not know these zeros. Before Linux 6.7 it follows such a function once only. It takes fields that
 * are still zero then for zero always, and removes the code behind conditions that seem to be false.
 */
#define blank(what) bpf_probe_read_kernel(what, sizeof(*(what)), 0)

/* Who asks; 0: nobody of PdP's guests. */
static __always_inline struct owner *asking(void)
{
	__u32 range = (__u32)bpf_get_current_uid_gid() >> USERS_BITS;
	__u64 *owner = bpf_map_lookup_elem(&ranges, &range);

	return owner ? bpf_map_lookup_elem(&owners, owner) : 0;
}

/* All messages of a call. */
struct asked {
	__u64 busy_ns; /* without what depends on the namespace */
	__u32 entries;
	__u32 links; /* new interfaces */
	__u32 changes; /* of one interface, which those above it follow */
	__u32 walks; /* through all routes of the namespace */
	__u32 nexthops; /* deleted */
};

struct walk {
	unsigned char *data;
	__u32 length;
	__u32 at;
	__u32 protocol;
	__u32 links_max;
	__u32 done; /* the walk has reached the last message */
	struct asked asked;
};

static __always_inline int is_light(__u16 attribute)
{
	switch (attribute) {
	case 1: /* IFLA_ADDRESS */
	case 3: /* IFLA_IFNAME */
	case 4: /* IFLA_MTU */
	case 13: /* IFLA_TXQLEN */
	case 16: /* IFLA_OPERSTATE */
	case 17: /* IFLA_LINKMODE */
	case 20: /* IFLA_IFALIAS */
	case IFLA_GROUP:
	case 29: /* IFLA_EXT_MASK */
	case 39: /* IFLA_PROTO_DOWN */
		return 1;
	}
	return 0;
}

struct change {
	__u32 is_heavy; /* the interface goes to another master or namespace, say */
	__u32 is_group; /* the message has IFLA_GROUP, or more attributes than the program reads */
};

static __always_inline void read_change(unsigned char *data, __u32 at, __u32 end, struct change *change)
{
	struct {
		__u16 length;
		__u16 type;
	} attribute;
	int i;

	at += LINK_HEADER;
	for (i = 0; i < ATTRIBUTES_MAX; i++) {
		if (at + sizeof(attribute) > end)
			return;
		if (bpf_probe_read_kernel(&attribute, sizeof(attribute), data + at) ||
		    attribute.length < sizeof(attribute))
			break;
		attribute.type &= 0x3fff;
		change->is_group |= attribute.type == IFLA_GROUP;
		change->is_heavy |= !is_light(attribute.type);
		at += (attribute.length + 3) & ~3u;
	}
	change->is_heavy = 1;
	change->is_group = 1;
}

/*
 * Adds a change of an interface, or of all interfaces of a group: net/core/rtnetlink.c, rtnl_group_changelink and
 * rtnl_group_dellink, which the kernel calls for messages without an index.
 *
 * The namespace may get more interfaces before such a request has the lock, so the request pays for as many as
 * a namespace can have. Of deleted ones it pays for the routes alone, since the rest was paid when they were made.
 */
static __always_inline void add_change(struct walk *walk, struct header *header)
{
	struct asked *asked = &walk->asked;
	struct change change = {};
	__u64 busy_ns;
	int index = 0;

	read_change(walk->data, walk->at, walk->at + header->length, &change);
	change.is_heavy |= header->type == RTM_DELLINK;
	busy_ns = change.is_heavy ? HEAVY_NS : LIGHT_NS;
	bpf_probe_read_kernel(&index, sizeof(index), walk->data + walk->at + INDEX_AT);
	if (header->type != RTM_SETLINK && index == 0 && change.is_group) {
		asked->busy_ns += header->type == RTM_DELLINK ? busy_ns : busy_ns * walk->links_max;
		asked->walks += walk->links_max;
		return;
	}
	asked->busy_ns += busy_ns;
	/*
	 * Up, down and MTU: net/8021q/vlan.c, vlan_device_event and net/bridge/br_if.c change what is above and below;
	 * net/ipv4/fib_frontend.c, fib_disable_ip and net/ipv6/route.c, rt6_disable_ip, rt6_mtu_change walk all routes.
	 */
	asked->changes++;
	asked->walks++;
}

/* A message that may name ranges of VLANs: net/bridge/br_netlink.c, br_afspec sets each of up to 4,094 on its own. */
static __always_inline __u64 ranges_ns(__u32 length)
{
	return length <= VLAN_MESSAGE ? LIGHT_NS : (length - LINK_HEADER) / VLAN_RANGE * CALL_NS;
}

static __always_inline void add_route(struct walk *walk, struct header *header)
{
	struct asked *asked = &walk->asked;
	__u8 family = 0;

	switch (header->type) {
	case RTM_NEWLINK:
		if (header->flags & NLM_F_CREATE) {
			/* Its end is as sure as its beginning. */
			asked->busy_ns += HEAVY_NS;
			asked->links++;
			return;
		}
	case RTM_DELLINK:
		add_change(walk, header);
		return;
	case RTM_SETLINK:
		/* For bridges, the kernel has a handler of its own: rtnl_bridge_setlink. It has none for RTM_NEWLINK. */
		bpf_probe_read_kernel(&family, 1, walk->data + walk->at + FAMILY_AT);
		if (family == AF_BRIDGE)
			asked->busy_ns += ranges_ns(header->length);
		else
			add_change(walk, header);
		return;
	case RTM_NEWVLAN:
	case RTM_DELVLAN:
	case RTM_NEWTUNNEL:
	case RTM_DELTUNNEL:
		asked->busy_ns += ranges_ns(header->length);
		return;
	case RTM_NEWQDISC:
	case RTM_DELQDISC:
		asked->busy_ns += HEAVY_NS;
		return;
	case RTM_DELADDR:
		/* net/ipv4/fib_frontend.c, fib_del_ifaddr; net/ipv6/route.c, rt6_remove_prefsrc: both look at all routes. */
		asked->busy_ns += LIGHT_NS;
		asked->walks++;
		return;
	case RTM_DELNEXTHOP:
		/* net/ipv4/nexthop.c, remove_nexthop waits for all readers, and flushes all routes if one used it. */
		asked->busy_ns += LIGHT_NS;
		asked->nexthops++;
		return;
	case RTM_NEWNEIGH:
		asked->entries++;
	case RTM_DELNEIGH:
	case RTM_NEWROUTE:
	case RTM_DELROUTE:
	case RTM_NEWNEXTHOP:
		return;
	}
	/* From RTM_BASE on, the third of four asks. */
	if (header->type >= RTM_NEWLINK && (header->type & 3) != 2)
		asked->busy_ns += LIGHT_NS;
}

static long look_at_message(__u32 number, struct walk *walk)
{
	struct header header;

	if (walk->at + 16 > walk->length) {
		walk->done = 1;
		return 1;
	}
	if (bpf_probe_read_kernel(&header, sizeof(header), walk->data + walk->at))
		return 1;
	/* The kernel stops here as well. */
	if (header.length < 16 || header.length > walk->length - walk->at) {
		walk->done = 1;
		return 1;
	}
	if (walk->protocol == NETLINK_ROUTE)
		add_route(walk, &header);
	else if (walk->protocol == NETLINK_GENERIC)
		walk->asked.busy_ns += header.type > GENERIC_CONTROL ? CALL_NS : 0;
	else if (header.type == CTNETLINK_NEW || header.type == CTNETLINK_EXP_NEW)
		walk->asked.entries++;
	walk->at += (header.length + 3) & ~3u;
	return 0;
}

struct count {
	struct list_head *head;
	struct list_head *at;
	__u32 links;
};

static long count_link(__u32 number, struct count *count)
{
	struct list_head *at;

	if (!count->at || count->at == count->head)
		return 1;
	count->links++;
	at = count->at;
	count->at = BPF_CORE_READ(at, next);
	return 0;
}

/* Interfaces of a namespace, but no more than `most`. */
static __always_inline __u32 links_of(struct net *net, __u32 most)
{
	struct list_head *head;
	struct count count;

	if (!net)
		return most;
	blank(&count);
	head = &net->dev_base_head;
	count.head = head;
	count.at = BPF_CORE_READ(head, next);
	bpf_loop(most, count_link, &count, 0);
	return count.links;
}

/*
 * Time that the kernel needs to walk all routes of a namespace, but no more than HEAVY_NS. It has no number of IPv4
 * routes. `fib_seq` counts their changes (net/ipv4/fib_notifier.c, call_fib4_notifiers), which are as many or more.
 */
static __always_inline __u64 walk_ns(struct net *net)
{
	struct rt6_statistics *stats = 0;
	__u64 ns = 0;

	if (!net)
		return HEAVY_NS;
	if (bpf_core_field_exists(net->ipv4.fib_seq))
		ns = (__u64)BPF_CORE_READ(net, ipv4.fib_seq) * ROUTE4_NS;
	if (bpf_core_field_exists(net->ipv6.rt6_stats) && bpf_core_field_exists(stats->fib_rt_entries))
		ns += (__u64)BPF_CORE_READ(net, ipv6.rt6_stats, fib_rt_entries) * ROUTE6_NS;
	return ns < HEAVY_NS ? ns : HEAVY_NS;
}

static __always_inline __u64 later(__u64 ahead_ns, __u64 ns)
{
	return ahead_ns > ns ? ahead_ns - ns : 0;
}

/* Charges all of a call to its owner, or nothing; then it returns the reason. */
static __always_inline int take(struct owner *owner, struct net *net, struct asked *asked)
{
	__u64 now = bpf_ktime_get_ns(), passed, busy_ns, entries_ns, each_ns;
	__u32 zero = 0, links = 0;
	struct settings *is = bpf_map_lookup_elem(&settings, &zero);
	int error = 0;

	if (!is || (!asked->busy_ns && !asked->entries))
		return 0;
	busy_ns = asked->busy_ns;
	if (asked->links || asked->changes)
		links = links_of(net, is->links_max);
	busy_ns += (__u64)asked->changes * links * UPPER_NS;
	if (asked->walks || asked->nexthops) {
		each_ns = walk_ns(net);
		busy_ns += asked->walks * each_ns;
		/* A router with many routes deletes many next hops, most of which no route uses any more. */
		busy_ns += asked->nexthops * (each_ns < CALL_NS ? each_ns : CALL_NS);
	}
	/* No later call could pass either, so this is no EAGAIN. */
	if (busy_ns > BURST_NS || asked->entries > ENTRIES_BURST)
		return -EMSGSIZE;
	if (asked->links && (__u64)links + asked->links > is->links_max)
		return -ENOSPC;
	bpf_spin_lock(&owner->lock);
	passed = now > owner->at_ns ? now - owner->at_ns : 0;
	owner->at_ns = now > owner->at_ns ? now : owner->at_ns;
	owner->busy_ns = later(owner->busy_ns, is->parts ? passed / is->parts : passed);
	owner->entries_ns = later(owner->entries_ns, passed);
	busy_ns += owner->busy_ns;
	entries_ns = owner->entries_ns + asked->entries * ENTRY_NS;
	if (asked->entries && entries_ns > ENTRIES_BURST * ENTRY_NS) {
		error = -ENOSPC;
	} else if (busy_ns > BURST_NS) {
		error = -EAGAIN;
	} else {
		owner->busy_ns = busy_ns;
		owner->entries_ns = entries_ns;
	}
	bpf_spin_unlock(&owner->lock);
	return error;
}

SEC("lsm/netlink_send")
int BPF_PROG(pdp_netlink, struct sock *sk, struct sk_buff *skb, int before)
{
	struct owner *owner = asking();
	struct walk walk;
	__u32 zero = 0;
	struct settings *is = bpf_map_lookup_elem(&settings, &zero);

	if (before || !owner || !is)
		return before;
	blank(&walk);
	walk.links_max = is->links_max;
	walk.protocol = BPF_CORE_READ(sk, sk_protocol);
	if (walk.protocol != NETLINK_ROUTE && walk.protocol != NETLINK_NETFILTER &&
	    walk.protocol != NETLINK_GENERIC)
		return 0;
	walk.data = BPF_CORE_READ(skb, data);
	walk.length = BPF_CORE_READ(skb, len);
	bpf_loop(MESSAGES_MAX, look_at_message, &walk, 0);
	if (!walk.done)
		return -EMSGSIZE;
	return take(owner, BPF_CORE_READ(sk, __sk_common.skc_net.net), &walk.asked);
}

/* Each call that may make an interface, among other things. */
static __always_inline int makes_link(__u32 call)
{
	return call == TUNSETIFF || call == 0x89a0 /* SIOCBRADDBR */ || call == 0x8940 ||
	       call == 0x8941 /* SIOCGIFBR, SIOCSIFBR */ || call == 0x8983 /* SIOCSIFVLAN */ ||
	       call >= 0x89f0 /* SIOCDEVPRIVATE, which makes tunnels */;
}

static __always_inline __u64 call_ns(__u32 call)
{
	/* Of sockets, routes and names; SIOCGIF*, which only ask. */
	if (call < 0x8914 || (call >= 0x894b && call < 0x8954))
		return 0;
	switch (call) {
	case 0x8915: case 0x8917: case 0x8919: case 0x891b: case 0x891d: case 0x891f:
	case 0x8921: case 0x8927: case 0x8933: case 0x8938: case 0x8942: case 0x8954:
		return 0;
	}
	if (call == 0x8946 /* SIOCETHTOOL */)
		return CALL_NS;
	/* Of bonds, bridges and drivers. */
	return call >= 0x8990 ? HEAVY_NS : LIGHT_NS;
}

/* True for the calls that change an interface as RTM_SETLINK does, or delete an address as RTM_DELADDR does. */
static __always_inline int changes_link(__u32 call)
{
	return call == 0x8914 /* SIOCSIFFLAGS */ || call == 0x8922 /* SIOCSIFMTU */ ||
	       call == 0x8924 /* SIOCSIFHWADDR */ || call == 0x8916 /* SIOCSIFADDR */ ||
	       call == 0x891c /* SIOCSIFNETMASK */ || call == 0x8936 /* SIOCDIFADDR */;
}

/* Older calls for the same. */
SEC("lsm/file_ioctl")
int BPF_PROG(pdp_ioctl, struct file *file, unsigned int call, unsigned long argument, int before)
{
	struct asked asked = {};
	struct owner *owner;
	struct socket *socket;
	struct net *net;

	if (before || !(call == TUNSETIFF || call >> 8 == SIOC))
		return before;
	owner = asking();
	if (!owner)
		return 0;
	if (makes_link(call)) {
		asked.busy_ns = HEAVY_NS;
		asked.links = 1;
	} else if (call == 0x8955) { /* SIOCSARP */
		asked.entries = 1;
	} else {
		asked.busy_ns = call_ns(call);
		asked.changes = asked.walks = changes_link(call);
	}
	socket = call == TUNSETIFF ? 0 : bpf_sock_from_file(file);
	if (socket)
		net = BPF_CORE_READ(socket, sk, __sk_common.skc_net.net);
	else
		net = BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), nsproxy, net_ns);
	return take(owner, net, &asked);
}

char LICENSE[] SEC("license") = "GPL";
