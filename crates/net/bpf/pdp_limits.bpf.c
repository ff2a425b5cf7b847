// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * What guests may ask their kernel for where all network namespaces share what it takes: time under the lock of all
 * changes of interfaces and addresses (RTNL), and memory that no cgroup is charged for.
 *
 * A guest is known by its user id, which is of the range of its vnet whatever namespace it is in; everybody else passes
 * at once. What a request takes is known by its kind: nearly all of them hold the lock for less than 0.5 ms, and those
 * that have an interface deleted, or moved, for about 20 ms. An owner (a tenant, or a network of the operators') has a
 * part of all time, which pdpd says, and may save up BURST_NS of it. Routes and next hops count nothing: they hold the
 * lock for some microseconds, and are charged to the guest.
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

/* Entries of tables that nobody is charged for. */
#define ENTRY_NS SEC_NS
#define ENTRIES_BURST 32768ull

/* Messages of one call; the kernel's buffer of a socket has room for no more of 16 bytes. */
#define MESSAGES_MAX 65536
/* Of a message that sets an interface; one with more has it for a heavy one. */
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
#define RTM_NEWROUTE 24
#define RTM_DELROUTE 25
#define RTM_NEWNEIGH 28
#define RTM_DELNEIGH 29
#define RTM_NEWQDISC 36
#define RTM_DELQDISC 37
#define RTM_NEWNEXTHOP 104
#define RTM_DELNEXTHOP 105
#define CTNETLINK_NEW 0x100
#define CTNETLINK_EXP_NEW 0x200
#define LINK_HEADER 32 /* nlmsghdr and ifinfomsg */

#define TUNSETIFF 0x400454ca
#define SIOC 0x89 /* the upper bits of those of sockets, linux/sockios.h */

#define FOLLOWED __attribute__((preserve_access_index))

struct list_head {
	struct list_head *next;
} FOLLOWED;

struct net {
	struct list_head dev_base_head;
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
	__u64 refused; /* requests */
};

struct settings {
	__u64 parts; /* an owner has one of so many parts of all time */
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

/* Who asks; 0: nobody of PdP's guests. */
static __always_inline struct owner *asking(void)
{
	__u32 range = (__u32)bpf_get_current_uid_gid() >> USERS_BITS;
	__u64 *owner = bpf_map_lookup_elem(&ranges, &range);

	return owner ? bpf_map_lookup_elem(&owners, owner) : 0;
}

/* What the messages of a call are together. */
struct asked {
	__u64 busy_ns;
	__u32 entries;
	__u32 links;
};

struct walk {
	unsigned char *data;
	__u32 length;
	__u32 at;
	__u32 protocol;
	__u32 done; /* the walk has reached the last message */
	struct asked asked;
};

static __always_inline int is_light(__u16 attribute)
{
	switch (attribute & 0x3fff) {
	case 1: /* IFLA_ADDRESS */
	case 3: /* IFLA_IFNAME */
	case 4: /* IFLA_MTU */
	case 13: /* IFLA_TXQLEN */
	case 16: /* IFLA_OPERSTATE */
	case 17: /* IFLA_LINKMODE */
	case 20: /* IFLA_IFALIAS */
	case 27: /* IFLA_GROUP */
	case 29: /* IFLA_EXT_MASK */
	case 39: /* IFLA_PROTO_DOWN */
		return 1;
	}
	return 0;
}

/* How long a message has the lock that changes an interface: long if that goes to another master or namespace, say. */
static __always_inline __u64 change_ns(unsigned char *data, __u32 at, __u32 end)
{
	struct {
		__u16 length;
		__u16 type;
	} attribute;
	__u8 family = 0;
	int i;

	/* What a bridge does at a port. */
	if (!bpf_probe_read_kernel(&family, 1, data + at + 16) && family == AF_BRIDGE)
		return LIGHT_NS;
	at += LINK_HEADER;
	for (i = 0; i < ATTRIBUTES_MAX; i++) {
		if (at + sizeof(attribute) > end)
			return LIGHT_NS;
		if (bpf_probe_read_kernel(&attribute, sizeof(attribute), data + at))
			return HEAVY_NS;
		if (attribute.length < sizeof(attribute) || !is_light(attribute.type))
			return HEAVY_NS;
		at += (attribute.length + 3) & ~3u;
	}
	return HEAVY_NS;
}

static __always_inline void add_route(struct walk *walk, struct header *header)
{
	struct asked *asked = &walk->asked;

	switch (header->type) {
	case RTM_NEWLINK:
		if (header->flags & NLM_F_CREATE) {
			/* Its end is as sure as its beginning. */
			asked->busy_ns += HEAVY_NS;
			asked->links++;
			return;
		}
		/* as RTM_SETLINK */
	case RTM_SETLINK:
		asked->busy_ns += change_ns(walk->data, walk->at, walk->at + header->length);
		return;
	case RTM_DELLINK:
	case RTM_NEWQDISC:
	case RTM_DELQDISC:
		asked->busy_ns += HEAVY_NS;
		return;
	case RTM_NEWNEIGH:
		asked->entries++;
	case RTM_DELNEIGH:
	case RTM_NEWROUTE:
	case RTM_DELROUTE:
	case RTM_NEWNEXTHOP:
	case RTM_DELNEXTHOP:
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

/* Whether a namespace has room for so many more interfaces. */
static __always_inline int has_room(struct net *net, __u32 links, __u32 most)
{
	struct count count = {};
	struct list_head *head;

	if (!net || links > most)
		return 0;
	head = &net->dev_base_head;
	count.head = head;
	count.at = BPF_CORE_READ(head, next);
	bpf_loop(most, count_link, &count, 0);
	return count.links + links <= most;
}

static __always_inline __u64 later(__u64 ahead_ns, __u64 ns)
{
	return ahead_ns > ns ? ahead_ns - ns : 0;
}

/* Takes all of it, or nothing and says why. */
static __always_inline int take(struct owner *owner, struct net *net, struct asked *asked)
{
	__u64 now = bpf_ktime_get_ns(), passed, busy_ns, entries_ns;
	__u32 zero = 0;
	struct settings *is = bpf_map_lookup_elem(&settings, &zero);
	int error = 0;

	if (!is || (!asked->busy_ns && !asked->entries))
		return 0;
	if (asked->links && !has_room(net, asked->links, is->links_max)) {
		__sync_fetch_and_add(&owner->refused, 1);
		return -ENOSPC;
	}
	bpf_spin_lock(&owner->lock);
	passed = now > owner->at_ns ? now - owner->at_ns : 0;
	owner->at_ns = now > owner->at_ns ? now : owner->at_ns;
	owner->busy_ns = later(owner->busy_ns, is->parts ? passed / is->parts : passed);
	owner->entries_ns = later(owner->entries_ns, passed);
	busy_ns = owner->busy_ns + asked->busy_ns;
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
	if (error)
		__sync_fetch_and_add(&owner->refused, 1);
	return error;
}

SEC("lsm/netlink_send")
int BPF_PROG(pdp_netlink, struct sock *sk, struct sk_buff *skb, int before)
{
	struct owner *owner = asking();
	struct walk walk = {};

	if (before || !owner)
		return before;
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

/* The older way to the same. */
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
	}
	socket = call == TUNSETIFF ? 0 : bpf_sock_from_file(file);
	if (socket)
		net = BPF_CORE_READ(socket, sk, __sk_common.skc_net.net);
	else
		net = BPF_CORE_READ((struct task_struct *)bpf_get_current_task(), nsproxy, net_ns);
	return take(owner, net, &asked);
}

char LICENSE[] SEC("license") = "GPL";
