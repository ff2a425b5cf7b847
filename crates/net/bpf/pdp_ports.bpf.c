// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * The two programs at the ports of a kernel vrouter: `pdp_out` at the root end of its veth sees all that the
 * vrouter sends, and says what becomes of it; `pdp_in` at the inner end, in the vrouter's namespace, sees all that
 * is delivered to it. Both count. Nothing ever reaches the stack of PdP's namespace.
 *
 * A link is a wire: what goes in comes out, whatever its addresses, type, tags or contents, if it has an Ethernet
 * header and no more bytes than fit.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <bpf/bpf_helpers.h>

#include "pdp_ports.h"

SEC("xdp")
int pdp_out(struct xdp_md *frame)
{
	__u32 number = frame->ingress_ifindex - INDEX_FIRST;
	__u64 bytes = frame->data_end - frame->data;
	struct port_counts *counts = bpf_map_lookup_elem(&port_counts, &number);
	struct port *port = bpf_map_lookup_elem(&ports, &number);
	__u64 now_ns = 0;
	__u32 to, closed;
	int passes = 1;

	if (!counts || !port)
		return XDP_ABORTED;
	count(&counts->from_vrouter, bytes);
	if (bytes < ETH_HLEN)
		return drop(counts, RUNT);
	if (port->bytes.step || port->frames.step)
		now_ns = bpf_ktime_get_ns();
	bpf_spin_lock(&port->lock);
	to = port->to;
	closed = port->closed;
	if (to && !closed && now_ns)
		passes = take(port, now_ns, bytes);
	bpf_spin_unlock(&port->lock);
	if (!to)
		return drop(counts, UNCONNECTED);
	if (closed)
		return drop(counts, LINK_DOWN);
	if (!passes)
		return drop(counts, POLICED);
	return deliver(frame, to - 1, bytes, counts);
}

SEC("xdp")
int pdp_in(struct xdp_md *frame)
{
	struct note *note = (void *)(long)frame->data_meta;
	__u64 bytes = frame->data_end - frame->data;
	struct port_counts *counts;
	__u32 number;

	if ((void *)(note + 1) > (void *)(long)frame->data)
		return XDP_DROP;
	number = note->port;
	counts = bpf_map_lookup_elem(&port_counts, &number);
	if (!counts)
		return XDP_DROP;
	count(&counts->to_vrouter, bytes);
	bpf_xdp_adjust_meta(frame, sizeof(*note));
	return XDP_PASS;
}

/* The kernel knows no word for "GPL-2.0 OR Apache-2.0"; the programs call no GPL-only helper, and this is what
 * they may be taken as. */
char LICENSE[] SEC("license") = "GPL";
