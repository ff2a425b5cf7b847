//! Everything that all share and that can run out: how much there is, what a tenant gets of it, and what tenants leave
//! to operators.
//!
//! The code that enforces a bound takes it from its row. The table of docs/tenants.md is made of these rows, and
//! `tests/shared.rs` refuses a constant `*_MAX` that is in no row and in no list of bounds of one owner's own.

use std::fmt::Write;

use crate::limits::*;
use crate::units::{Bytes, Cores};

/// One thing that all share.
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// What it is.
    pub name: &'static str,
    /// How its numbers are written.
    pub unit: Unit,
    /// How much of it there is; `None`: it depends on the machine, as `of` says.
    pub total: Option<u64>,
    /// What the total is, where no number says it.
    pub of: &'static str,
    /// What one tenant gets, unless its quota says otherwise; 0: no bound.
    pub tenant: u64,
    /// Key of the quota that says otherwise.
    pub key: Option<&'static str>,
    /// What all tenants together leave to operators.
    pub operators: u64,
    /// Where it is counted, below `crates`.
    pub counted: &'static str,
    /// The test that shows it: a file below `crates`, and a function.
    pub test: (&'static str, &'static str),
    /// Constants `*_MAX` that say the same: a file below `crates`, and a name.
    pub constants: &'static [(&'static str, &'static str)],
}

/// How numbers are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// As they are.
    Count,
    /// Bytes.
    Bytes,
    /// Thousandths of a core.
    Cores,
}

impl Shared {
    /// What all tenants together may have.
    pub const fn tenants(&self) -> u64 {
        match self.total {
            Some(total) => total - self.operators,
            None => u64::MAX,
        }
    }

    fn write(&self, value: u64) -> String {
        match self.unit {
            Unit::Count => value.to_string(),
            Unit::Bytes => Bytes(value).to_string(),
            Unit::Cores => Cores(u32::try_from(value).unwrap_or(u32::MAX)).to_string(),
        }
    }
}

const TENANTS: &str = "spec/src/check/tenant.rs";
const QUOTA_TEST: (&str, &str) =
    ("spec/tests/tenants.rs", "quotas_hold_over_all_of_a_tenants_vnets");
const BOUND_TEST: (&str, &str) =
    ("spec/tests/tenants.rs", "what_all_share_has_a_bound_for_each_tenant");

const fn quota(name: &'static str, key: &'static str, tenant: u64, of: &'static str) -> Shared {
    Shared {
        name,
        unit: Unit::Count,
        total: None,
        of,
        tenant,
        key: Some(key),
        operators: 0,
        counted: TENANTS,
        test: BOUND_TEST,
        constants: &[],
    }
}

/// Networks, with those that are being removed.
pub const VNETS: Shared = Shared {
    total: Some(VNETS_MAX as u64),
    test: QUOTA_TEST,
    constants: &[("spec/src/limits.rs", "VNETS_MAX")],
    ..quota("virtual networks", "vnets", TENANT_VNETS_DEFAULT, "")
};

/// Ranges of user ids, one for each network.
pub const USER_IDS: Shared = Shared {
    name: "ranges of user ids that it has or ever had",
    unit: Unit::Count,
    total: Some(28_000),
    of: "",
    tenant: 2 * VNETS_MAX as u64,
    key: None,
    operators: VNETS_MAX as u64,
    counted: "pdpd/src/ledger.rs",
    test: ("pdpd/src/ledger.rs", "numbers_have_an_end_and_a_part_that_is_the_operators"),
    constants: &[
        ("pdpd/src/ledger.rs", "NUMBERS_MAX"),
        ("pdpd/src/ledger.rs", "TENANT_NUMBERS_MAX"),
        // One a network, by its number.
        ("net/src/ports/mod.rs", "LIMITS_MAX"),
    ],
};

/// Captures, of both planes.
pub const CAPTURES: Shared = Shared {
    name: "captures at a time",
    unit: Unit::Count,
    total: Some(32),
    of: "",
    tenant: 4,
    key: None,
    operators: 16,
    counted: "pdpd/src/observers.rs",
    test: (
        "pdpd/src/observers.rs",
        "no_tenant_has_all_captures_and_tenants_leave_operators_theirs",
    ),
    constants: &[("mux/src/capture.rs", "CAPTURES_MAX")],
};

/// Traces, of both planes. Each has a connection to the mux until it ends, and other calls need some too.
pub const TRACES: Shared = Shared {
    name: "traces at a time",
    total: Some(16),
    tenant: 3,
    operators: 4,
    constants: &[
        ("mux/src/trace.rs", "TRACES_MAX"),
        ("mux/src/control/serve.rs", "CONNECTIONS_MAX"),
    ],
    ..CAPTURES
};

/// Ports of routers whose frames stay in the kernel.
pub const KERNEL_PORTS: Shared = Shared {
    total: Some(16_384),
    operators: 2_048,
    counted: "pdpd/src/ledger.rs",
    test: ("pdpd/src/ledger.rs", "tenants_leave_kernel_ports_to_operators"),
    constants: &[("net/src/ports/mod.rs", "PORTS_MAX")],
    ..quota("ports whose frames stay in the kernel", "vports", TENANT_VPORTS_DEFAULT, "")
};

/// Workers that make the machine as is wanted.
pub const WORKERS: Shared = Shared {
    name: "steps of the reconciler at a time",
    unit: Unit::Count,
    total: Some(32),
    of: "",
    tenant: 4,
    key: None,
    operators: 4,
    counted: "pdpd/src/queue.rs",
    test: ("pdpd/src/queue.rs", "tenants_leave_workers_to_operators_and_to_who_has_none"),
    constants: &[],
};

/// Requests that are answered at once.
pub const CALLS: Shared = Shared {
    name: "requests at a time",
    unit: Unit::Count,
    total: Some(256 + 64),
    of: "",
    tenant: 16,
    key: None,
    operators: 64,
    counted: "pdpd/src/http/room.rs",
    test: ("pdpd/tests/access.rs", "a_tenant_takes_no_room_from_others"),
    constants: &[
        ("pdpd/src/http/mod.rs", "CALLS_MAX"),
        ("pdpd/src/http/mod.rs", "TENANT_CALLS_MAX"),
        ("pdpd/src/http/mod.rs", "TENANTS_CALLS_MAX"),
    ],
};

/// Requests whose answers go on.
pub const SESSIONS: Shared = Shared {
    name: "sessions at a time (watches, captures, logs, route tables, commands)",
    tenant: TENANT_SESSIONS_DEFAULT as u64,
    key: Some("sessions"),
    test: (
        "pdpd/src/http/room.rs",
        "sessions_are_as_many_as_the_quota_says_and_those_of_others_are_theirs",
    ),
    constants: &[
        ("pdpd/src/http/mod.rs", "STREAMS_MAX"),
        ("pdpd/src/http/mod.rs", "TENANTS_STREAMS_MAX"),
    ],
    ..CALLS
};

/// Bodies of requests.
pub const BODIES: Shared = Shared {
    name: "bodies of requests at a time",
    unit: Unit::Bytes,
    total: Some(384 << 20),
    tenant: 48 << 20,
    operators: 128 << 20,
    test: (
        "pdpd/src/http/room.rs",
        "bodies_are_bounded_by_tenant_and_over_all_and_give_their_room_back",
    ),
    constants: &[
        ("pdpd/src/http/room.rs", "BODIES_BYTES_MAX"),
        ("pdpd/src/http/room.rs", "TENANT_BODIES_BYTES_MAX"),
        ("pdpd/src/http/room.rs", "TENANTS_BODIES_BYTES_MAX"),
    ],
    ..CALLS
};

/// Connections to the API.
pub const CONNECTIONS: Shared = Shared {
    name: "connections: of one user by the socket, or of one address over TLS",
    unit: Unit::Count,
    total: Some(3 * 256),
    of: "",
    tenant: 32,
    key: None,
    operators: 256,
    counted: "pdpd/src/http/connection.rs",
    test: ("pdpd/tests/access.rs", "one_address_takes_no_more_than_its_connections"),
    constants: &[
        ("pdpd/src/http/mod.rs", "CONNECTIONS_MAX"),
        ("pdpd/src/http/mod.rs", "CONNECTIONS_PER_PEER_MAX"),
    ],
};

/// Images that are being got from registries and archives, or wait for that.
pub const DOWNLOADS: Shared = Shared {
    name: "images that are got, or wait for it",
    unit: Unit::Count,
    total: Some(128),
    of: "",
    tenant: 4,
    key: None,
    operators: 0,
    counted: "pdpd/src/images.rs",
    test: ("pdpd/src/images.rs", "a_tenant_waits_for_few_images_and_leaves_others_their_places"),
    constants: &[
        ("pdpd/src/images.rs", "TENANT_LINE_MAX"),
        ("pdpd/src/images.rs", "TENANTS_LINE_MAX"),
        ("pdpd/src/images.rs", "PULLS_MAX"),
    ],
};

/// Row of what the kernel or a helper bounds for each guest, node or namespace by itself.
const fn each(name: &'static str, tenant: u64, of: &'static str) -> Shared {
    Shared { key: None, ..quota(name, "", tenant, of) }
}

/// What the kernel counts for all guests together.
const KERNEL: [Shared; 4] = [
    Shared {
        counted: "container/src/bundle.rs",
        test: (
            "container/tests/guests.rs",
            "a_guest_that_takes_all_terminals_and_instances_leaves_other_guests_theirs",
        ),
        constants: &[("container/src/bundle.rs", "TERMINALS_MAX")],
        ..each("pseudo-terminals of each guest", 64, "`kernel.pty.max`, raised to the guests' sum")
    },
    Shared {
        counted: "container/src/view.rs",
        test: (
            "container/tests/guests.rs",
            "a_guest_that_takes_all_terminals_and_instances_leaves_other_guests_theirs",
        ),
        constants: &[("container/src/view.rs", "INOTIFY_INSTANCES_MAX")],
        ..each(
            "inotify instances of each guest",
            128,
            "`fs.inotify.max_user_instances`, raised to a network's sum",
        )
    },
    Shared {
        counted: "net/src/limits.rs",
        test: (
            "e2e/tests/e2e/beside/stock_debian.rs",
            "no_guest_takes_of_the_kernel_what_all_share",
        ),
        constants: &[("net/src/limits.rs", "LINKS_MAX")],
        ..each(
            "interfaces of each network namespace (with BPF LSM)",
            320,
            "time under the kernel's lock, a quarter of it for all owners",
        )
    },
    Shared {
        counted: "net/src/shared.rs",
        test: (
            "e2e/tests/e2e/beside/stock_debian.rs",
            "no_guest_takes_of_the_kernel_what_all_share",
        ),
        constants: &[("net/src/shared.rs", "CONNECTIONS_MAX")],
        ..each("tracked connections of each network namespace", 16_384, "the kernel's memory")
    },
];

/// What the daemon and its helpers do for a tenant outside of its guests.
const OUTSIDE: [Shared; 5] = [
    Shared {
        unit: Unit::Cores,
        counted: "container/src/work.rs",
        test: ("container/tests/images.rs", "checking_an_image_is_charged_to_its_owner"),
        ..each(
            "CPU for images that are read, checked and unpacked, and for new volumes",
            1000,
            "a tenth of a core for all while others want it",
        )
    },
    Shared {
        counted: "container/src/image/unpacked.rs",
        test: (
            "container/tests/images.rs",
            "owners_unpack_beside_each_other_and_two_images_at_a_time",
        ),
        constants: &[("container/src/image/unpacked.rs", "UNPACKING_MAX")],
        ..each("images that are unpacked at a time", 2, "")
    },
    Shared {
        counted: "management/src/udp.rs",
        test: (
            "management/src/udp.rs",
            "a_node_of_many_flows_has_so_many_sockets_and_fewer_where_few_ports_are_free",
        ),
        constants: &[("management/src/udp.rs", "FLOWS_MAX")],
        ..each(
            "outgoing UDP flows of each node with `management.outside`",
            256,
            "half of the machine's ephemeral ports, in equal parts where nodes want more",
        )
    },
    Shared {
        counted: "management/src/echo.rs",
        test: (
            "management/src/echo.rs",
            "a_node_of_many_identifiers_has_so_many_sockets_and_fewer_where_few_are_free",
        ),
        constants: &[("management/src/echo.rs", "ECHOES_MAX")],
        ..each(
            "pinged addresses at a time of each node with `management.outside`",
            64,
            "half of the machine's 65535 echo identifiers, in equal parts where nodes want more",
        )
    },
    Shared {
        unit: Unit::Bytes,
        counted: "spec/src/usage.rs",
        test: (
            "e2e/tests/e2e/beside/boundaries.rs",
            "what_the_run_directory_has_of_guests_is_less_than_what_is_counted",
        ),
        ..quota(
            "the run directory, counted with memory limits",
            "memory",
            TENANT_MEMORY_DEFAULT,
            "the file system of the run directory",
        )
    },
];

const DISK: &str = "the disk of the state directory";

/// All of it.
pub const ALL: [Shared; 38] = [
    VNETS,
    USER_IDS,
    Shared {
        test: QUOTA_TEST,
        ..quota("nodes", "nodes", TENANT_NODES_DEFAULT, "what the rest allows")
    },
    Shared {
        unit: Unit::Cores,
        test: QUOTA_TEST,
        ..quota(
            "power",
            "power",
            TENANT_POWER_DEFAULT,
            "the capacity of the forwarding engines, and half of the mux's power",
        )
    },
    Shared {
        unit: Unit::Cores,
        test: QUOTA_TEST,
        ..quota("CPU of hosts and control guests", "cpu", TENANT_CPU_DEFAULT, "the machine's CPUs")
    },
    Shared {
        unit: Unit::Bytes,
        ..quota("memory limits", "memory", TENANT_MEMORY_DEFAULT, "`managementHost.memory`")
    },
    quota("processes", "processes", TENANT_PROCESSES_DEFAULT, "`kernel.pid_max` of the machine"),
    Shared {
        test: QUOTA_TEST,
        ..quota("interfaces", "vports", TENANT_VPORTS_DEFAULT, "what the rest allows")
    },
    KERNEL_PORTS,
    Shared { test: QUOTA_TEST, ..quota("rates of links", "rate", 0, "`capacity` of interfaces") },
    Shared { test: QUOTA_TEST, ..quota("routes", "routes", TENANT_ROUTES_DEFAULT, "memory") },
    Shared {
        unit: Unit::Bytes,
        test: QUOTA_TEST,
        ..quota(
            "specs",
            "specs",
            TENANT_SPECS_DEFAULT,
            "memory, and the disk of the state directory",
        )
    },
    Shared { unit: Unit::Bytes, ..quota("logs", "logs", TENANT_LOGS_DEFAULT, DISK) },
    Shared {
        unit: Unit::Bytes,
        ..quota(
            "volumes",
            "volumes",
            TENANT_VOLUMES_DEFAULT,
            "the same disk, of which a new one leaves 256 MiB free",
        )
    },
    quota(
        "images that nodes run on",
        "ociImages",
        TENANT_OCI_IMAGES_DEFAULT,
        "the same disk; an image has 16 GiB at most",
    ),
    Shared {
        unit: Unit::Bytes,
        counted: "pdpd/src/images.rs",
        test: ("container/tests/images.rs", "directories_count_for_blocks_and_inodes"),
        ..quota(
            "blocks of kept images, packed and unpacked",
            "images",
            TENANT_IMAGES_DEFAULT,
            "the same disk, of which unpacking leaves 256 MiB free",
        )
    },
    Shared {
        counted: "pdpd/src/images.rs",
        test: ("container/tests/images.rs", "directories_count_for_blocks_and_inodes"),
        ..quota(
            "files and directories of kept images",
            "imageFiles",
            TENANT_IMAGE_FILES_DEFAULT,
            "the disk's inodes, of which unpacking leaves 5 % free",
        )
    },
    DOWNLOADS,
    quota(
        "descriptors",
        "descriptors",
        TENANT_DESCRIPTORS_DEFAULT,
        "`LimitNOFILE` of pdpd's service, less 2,432 for its API",
    ),
    Shared {
        total: Some(REGIONS_MAX),
        constants: &[
            ("spec/src/limits.rs", "REGIONS_MAX"),
            ("memif/src/sigbus.rs", "REGIONS_COUNT_MAX"),
        ],
        ..quota("regions of memory that the mux maps", "regions", TENANT_REGIONS_DEFAULT, "")
    },
    Shared {
        test: (
            "spec/tests/buffers.rs",
            "a_tenants_queues_have_no_more_than_its_quota_and_it_is_told_nothing_of_others",
        ),
        ..quota(
            "packets that queues set aside",
            "buffers",
            TENANT_BUFFERS_DEFAULT,
            "half of the packets of one of the mux's workers, 16,384 of one worker",
        )
    },
    CAPTURES,
    TRACES,
    WORKERS,
    CALLS,
    SESSIONS,
    BODIES,
    CONNECTIONS,
    Shared {
        counted: "pdpd/src/state/trail.rs",
        test: (
            "pdpd/src/state/trail.rs",
            "nobody_pushes_out_anothers_rows_nor_refusals_what_was_changed",
        ),
        constants: &[
            ("pdpd/src/state/trail.rs", "NODE_ROWS_MAX"),
            ("pdpd/src/state/trail.rs", "STRANGER_ROWS_MAX"),
        ],
        ..quota(
            "rows of the audit log of each sort",
            "audit",
            TENANT_AUDIT_DEFAULT as u64,
            "the same disk, less than 4 KiB a row",
        )
    },
    KERNEL[0],
    KERNEL[1],
    KERNEL[2],
    KERNEL[3],
    OUTSIDE[0],
    OUTSIDE[1],
    OUTSIDE[2],
    OUTSIDE[3],
    OUTSIDE[4],
];

/// Begin and end of the table in docs/tenants.md.
pub const BEGIN: &str =
    "<!-- shared: begin; made by `cargo run -p pdp-spec --example publish` -->\n";
/// See [`BEGIN`].
pub const END: &str = "<!-- shared: end -->\n";

/// The table of docs/tenants.md.
pub fn markdown() -> String {
    let mut text = "| what | key of `quota` | a tenant's, unless `quota` says | in all | of that operators' alone |\n\
                    |---|---|---|---|---|\n"
        .to_owned();
    for row in &ALL {
        let key = row.key.map_or(String::new(), |key| format!("`{key}`"));
        let tenant = if row.tenant == 0 { "no bound".into() } else { row.write(row.tenant) };
        let total = row.total.map_or(row.of.to_owned(), |total| row.write(total));
        let operators = if row.operators == 0 { String::new() } else { row.write(row.operators) };
        // Writing to a string does not fail.
        let _ = writeln!(text, "| {} | {key} | {tenant} | {total} | {operators} |", row.name);
    }
    text
}
