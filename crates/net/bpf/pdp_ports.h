/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What programs know of the ports of kernel vrouters: maps, which all of them share, and what a rate lets
 * through. Names and layouts: src/ports.
 */
#ifndef PDP_PORTS_H
#define PDP_PORTS_H

#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#define PORTS_MAX 16384

/* The index of a port's root end in PdP's namespace is the port's number and this. Nobody else makes interfaces
 * there but the kernel, which gives each namespace some of its own where it has modules of tunnels. */
#define INDEX_FIRST 4096

/* Times of buckets are in parts of a nanosecond, so that no rounding adds up. */
#define FRACTION_BITS 20

/* A limit: how far ahead of now the bucket is, and may be (crates/mux/src/police.rs has the same as the time at
 * which it is full again). 64 bits are enough for a frame of 8,192 bytes at 1 byte/s on top of a burst of an hour. */
struct bucket {
	__u64 step; /* time that one unit takes; 0: no limit */
	__u64 burst;
	__u64 ahead;
};

/* What each frame needs is in front, within one line of a cache. */
struct port {
	struct bpf_spin_lock lock;
	__u32 to; /* number of the port at the link's other end and 1; 0: no link; or OUTSIDE */
	__u32 frame_bytes_max; /* of what is delivered here; 0: nothing is */
	__u32 vrouter; /* whose it is: in `vrouters` */
	__u32 inner; /* index of the inner end in its namespace; 0: there is none */
	__u32 thread; /* that alone may serve the inner end; 0: whoever does */
	__u8 closed; /* its link is down */
	__u8 policed; /* one of the buckets has a limit */
	__u8 aside; /* what hooks into forwarding, by what the watcher says */
	__u8 reserved;
	__u32 ran; /* thread that was charged last; this and `ran_ns` are written without the lock */
	__u64 ran_ns; /* its CPU time then */
	__u32 overhead_bytes; /* what each frame counts beyond its own bytes */
	__u8 mac[6]; /* link address of the inner end, as it was made */
	__u16 reserved_too;
	__u32 netns; /* number of the inner end's network namespace */
	struct bucket bytes;
	struct bucket frames;
	__u64 taken_ns; /* when something was taken last */
	__u64 settled; /* for src/ports alone */
	__u64 unused; /* so that none shares a line with another */
};

/* What the ports of a vrouter have in common. */
struct vrouter {
	struct bpf_spin_lock lock; /* of paid_ns */
	__u32 bytes_max[2]; /* the smallest MTU of any route, IPv4 and IPv6 */
	__u32 reserved;
	__u64 until_ns; /* of the monotonic clock: nothing goes the short way from then on */
	__u64 scale; /* what a nanosecond of CPU time counts, of 1 << FRACTION_BITS; 0: no limit */
	__u64 paid_ns; /* of the monotonic clock: when the CPU time that was used is paid for */
	__u64 unused[3]; /* so that none shares a line with another */
};

/* How far ahead of now that may be. */
#define POWER_BURST_NS 10000000ull

#define OUTSIDE 0xffffffff

enum reason {
	RUNT,
	POLICED,
	UNCONNECTED,
	LINK_DOWN,
	TOO_BIG,
	CONGESTED,
	UNRESOLVED,
	UNDERLAY_TOO_BIG,
	POWER,
	UNPAID,
	REASONS,
	SENT = REASONS
};

/* What became of a frame that was given to the vrouter. All but SHORT: passed to the stack. */
enum way {
	SHORT, /* sent out of another port */
	SILENT, /* nobody says that nothing is in the way */
	HOOKED, /* something is */
	SPECIAL, /* nothing that is plainly routed */
	ROUTE, /* no plain unicast route out of another port */
	NEIGHBOUR, /* not known */
	BEYOND_MTU, /* too big for the way */
	SOURCE, /* one that the stack validates */
	WAYS
};

struct traffic {
	__u64 frames;
	__u64 bytes;
};

/* from_vrouter = to_link + dropped, and what arrives at the inner end is from_link - refused - what is lost on
 * the way there. */
struct port_counts {
	struct traffic from_vrouter;
	struct traffic to_link;
	struct traffic from_link;
	struct traffic to_vrouter; /* arrived at the inner end */
	__u64 ways[WAYS]; /* their sum is to_vrouter.frames */
	__u64 dropped[REASONS];
	__u64 refused[REASONS];
};

/* Before a frame on its way to an inner end, where the stack does not see it: for which port it is. No guest can
 * forge it: all that comes into an inner end was redirected to its root end. */
struct note {
	__u32 port;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PORTS_MAX);
	__type(key, __u32);
	__type(value, struct port);
} ports SEC(".maps");

/* Root ends, by the port's number. The kernel empties the entry of one that goes. */
struct {
	__uint(type, BPF_MAP_TYPE_DEVMAP);
	__uint(max_entries, PORTS_MAX);
	__type(key, __u32);
	__type(value, __u32);
} ends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, PORTS_MAX);
	__type(key, __u32);
	__type(value, struct port_counts);
} port_counts SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, PORTS_MAX);
	__type(key, __u32);
	__type(value, struct vrouter);
} vrouters SEC(".maps");

static __always_inline void add(struct traffic *traffic, __u64 bytes)
{
	traffic->frames += 1;
	traffic->bytes += bytes;
}

static __always_inline int drop(struct port_counts *counts, enum reason reason)
{
	counts->dropped[reason] += 1;
	return XDP_DROP;
}

static __always_inline int refuse(struct port_counts *counts, enum reason reason)
{
	counts->refused[reason] += 1;
	return XDP_DROP;
}

/* What is left of `ahead` after `passed_ns`. */
static __always_inline __u64 later(__u64 ahead, __u64 passed_ns)
{
	return (ahead >> FRACTION_BITS) < passed_ns ? 0 : ahead - (passed_ns << FRACTION_BITS);
}

/* Takes a frame that counts as `bytes` out of both buckets, if both have it. They are locked. */
static __always_inline int take(struct bucket *bytes, struct bucket *frames, __u64 *taken_ns, __u64 now_ns,
				__u64 count)
{
	/* Clocks of processors may differ a little. */
	__u64 passed_ns = now_ns > *taken_ns ? now_ns - *taken_ns : 0;
	__u64 of_bytes = later(bytes->ahead, passed_ns) + count * bytes->step;
	__u64 of_frames = later(frames->ahead, passed_ns) + frames->step;

	if (of_bytes > bytes->burst || of_frames > frames->burst)
		return 0;
	bytes->ahead = of_bytes;
	frames->ahead = of_frames;
	*taken_ns += passed_ns;
	return 1;
}

/* Whether the vrouter has used more CPU time than it may have. Read without the lock: a charge of this very moment
 * is seen by the next frame. */
static __always_inline int is_spent(__u32 number)
{
	struct vrouter *vrouter = bpf_map_lookup_elem(&vrouters, &number);

	return vrouter && vrouter->scale && vrouter->paid_ns > bpf_ktime_get_coarse_ns() + POWER_BURST_NS;
}

/* Sends the frame in `frame`, of `bytes`, to the vrouter at port `number`, or says why not. `noted`: there is a note
 * before it already. */
static __always_inline enum reason deliver(struct xdp_md *frame, __u32 number, __u64 bytes, const int noted)
{
	struct port *port = bpf_map_lookup_elem(&ports, &number);
	struct note *note;

	if (!port || !port->frame_bytes_max)
		return LINK_DOWN;
	if (bytes > port->frame_bytes_max)
		return TOO_BIG;
	if (is_spent(port->vrouter))
		return POWER;
	if (!noted && bpf_xdp_adjust_meta(frame, -(int)sizeof(*note)))
		return LINK_DOWN;
	note = (void *)(long)frame->data_meta;
	if ((void *)(note + 1) > (void *)(long)frame->data)
		return LINK_DOWN;
	note->port = number;
	return bpf_redirect_map(&ends, number, XDP_ABORTED) == XDP_REDIRECT ? SENT : LINK_DOWN;
}

#endif
