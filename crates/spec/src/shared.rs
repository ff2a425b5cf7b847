//! All resources that tenants share and that can run out: the
//! total, a tenant's part, and the reserve for operators.
//!
//! Code that enforces a limit takes it from its row. The table of docs/tenants.md
//! is generated from these rows. `tests/shared.rs` rejects a constant `*_MAX`
//! that is in no row and in no list of limits of a single owner.

use std::fmt::Write;

use crate::limits::*;
use crate::units::{Bytes, Cores};

/// One shared resource.
#[derive(Clone, Copy, Debug)]
pub struct SharedResource {
    /// Name of the resource.
    pub name: &'static str,
    /// Notation of its numbers.
    pub unit: ResourceUnit,
    /// Total amount. `None`: it depends on the machine, as `of` describes.
    pub total: Option<u64>,
    /// Description of the total, if it is not a number.
    pub of: &'static str,
    /// Default limit of one tenant; 0: no limit.
    pub tenant: u64,
    /// Key of the quota that overrides the default.
    pub key: Option<&'static str>,
    /// Amount reserved for operators.
    pub operators: u64,
    /// Source file that counts it, below `crates`.
    pub counted: &'static str,
    /// Test that shows it: a file below `crates`, and a function.
    pub test: (&'static str, &'static str),
    /// Constants `*_MAX` with the same value: a file below `crates`, and a name.
    pub constants: &'static [(&'static str, &'static str)],
}

/// Notation of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResourceUnit {
    /// Plain number.
    Count,
    /// Bytes.
    Bytes,
    /// Thousandths of a core.
    Cores,
}

impl SharedResource {
    /// Maximum for all tenants together.
    pub const fn tenants(&self) -> u64 {
        match self.total {
            Some(total) => total - self.operators,
            None => u64::MAX,
        }
    }

    fn write(&self, value: u64) -> String {
        match self.unit {
            ResourceUnit::Count => value.to_string(),
            ResourceUnit::Bytes => Bytes(value).to_string(),
            ResourceUnit::Cores => Cores(u32::try_from(value).unwrap_or(u32::MAX)).to_string(),
        }
    }
}

const TENANTS: &str = "spec/src/check/tenant.rs";
const QUOTA_TEST: (&str, &str) = ("spec/tests/tenants.rs", "quota_spans_all_vnets_of_a_tenant");
const BOUND_TEST: (&str, &str) =
    ("spec/tests/tenants.rs", "every_shared_resource_has_a_tenant_quota");

const fn quota(
    name: &'static str,
    key: &'static str,
    tenant: u64,
    of: &'static str,
) -> SharedResource {
    SharedResource {
        name,
        unit: ResourceUnit::Count,
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

/// Networks, including those being removed.
pub const VNETS: SharedResource = SharedResource {
    total: Some(VNETS_MAX as u64),
    test: QUOTA_TEST,
    constants: &[("spec/src/limits.rs", "VNETS_MAX")],
    ..quota("virtual networks", "vnets", TENANT_VNETS_DEFAULT, "")
};

/// Ranges of user ids, one per network.
pub const USER_IDS: SharedResource = SharedResource {
    name: "ranges of user ids, current and earlier",
    unit: ResourceUnit::Count,
    total: Some(28_000),
    of: "",
    tenant: 2 * VNETS_MAX as u64,
    key: None,
    operators: VNETS_MAX as u64,
    counted: "pdpd/src/plan/allocations.rs",
    test: ("pdpd/src/plan/allocations.rs", "numbers_are_limited_and_partly_reserved_for_operators"),
    constants: &[
        ("pdpd/src/plan/allocations.rs", "NUMBERS_MAX"),
        ("pdpd/src/plan/allocations.rs", "TENANT_NUMBERS_MAX"),
        // One per network, by its number.
        ("net/src/ports/mod.rs", "LIMITS_MAX"),
    ],
};

/// Captures, of both data planes.
pub const CAPTURES: SharedResource = SharedResource {
    name: "captures at a time",
    unit: ResourceUnit::Count,
    total: Some(32),
    of: "",
    tenant: 4,
    key: None,
    operators: 16,
    counted: "pdpd/src/kernel/observers.rs",
    test: ("pdpd/src/kernel/observers.rs", "captures_are_limited_per_tenant_and_for_all"),
    constants: &[("mux/src/capture.rs", "CAPTURES_MAX")],
};

/// Traces, of both data planes. Each uses a connection to
/// the mux until it ends, and other calls need some too.
pub const TRACES: SharedResource = SharedResource {
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
pub const KERNEL_PORTS: SharedResource = SharedResource {
    total: Some(16_384),
    operators: 2_048,
    counted: "pdpd/src/plan/allocations.rs",
    test: ("pdpd/src/plan/allocations.rs", "tenants_cannot_exhaust_kernel_ports"),
    constants: &[("net/src/ports/mod.rs", "PORTS_MAX")],
    ..quota("ports whose frames stay in the kernel", "vports", TENANT_VPORTS_DEFAULT, "")
};

/// Workers that reconcile the machine with the desired state.
pub const WORKERS: SharedResource = SharedResource {
    name: "steps of the reconciler at a time",
    unit: ResourceUnit::Count,
    total: Some(32),
    of: "",
    tenant: 4,
    key: None,
    operators: 4,
    counted: "pdpd/src/reconcile/queue.rs",
    test: ("pdpd/src/reconcile/queue.rs", "queue_reserves_workers_for_operators_and_new_owners"),
    constants: &[],
};

/// Requests with immediate answers.
pub const CALLS: SharedResource = SharedResource {
    name: "requests at a time",
    unit: ResourceUnit::Count,
    total: Some(256 + 64),
    of: "",
    tenant: 16,
    key: None,
    operators: 64,
    counted: "pdpd/src/api/limits.rs",
    test: ("pdpd/tests/access.rs", "tenant_cannot_exhaust_other_clients_requests"),
    constants: &[
        ("pdpd/src/api/mod.rs", "CALLS_MAX"),
        ("pdpd/src/api/mod.rs", "TENANT_CALLS_MAX"),
        ("pdpd/src/api/mod.rs", "TENANTS_CALLS_MAX"),
    ],
};

/// Requests with streaming answers.
pub const SESSIONS: SharedResource = SharedResource {
    name: "sessions at a time (watches, captures, logs, route tables, commands)",
    tenant: TENANT_SESSIONS_DEFAULT as u64,
    key: Some("sessions"),
    test: ("pdpd/src/api/limits.rs", "session_quota_limits_each_tenant_separately"),
    constants: &[
        ("pdpd/src/api/mod.rs", "STREAMS_MAX"),
        ("pdpd/src/api/mod.rs", "TENANTS_STREAMS_MAX"),
    ],
    ..CALLS
};

/// Request bodies.
pub const BODIES: SharedResource = SharedResource {
    name: "request bodies at a time",
    unit: ResourceUnit::Bytes,
    total: Some(384 << 20),
    tenant: 48 << 20,
    operators: 128 << 20,
    test: ("pdpd/src/api/limits.rs", "body_limits_apply_per_tenant_and_overall"),
    constants: &[
        ("pdpd/src/api/limits.rs", "BODIES_BYTES_MAX"),
        ("pdpd/src/api/limits.rs", "TENANT_BODIES_BYTES_MAX"),
        ("pdpd/src/api/limits.rs", "TENANTS_BODIES_BYTES_MAX"),
    ],
    ..CALLS
};

/// Connections to the API.
pub const CONNECTIONS: SharedResource = SharedResource {
    name: "connections, per user of the socket or per address over TLS",
    unit: ResourceUnit::Count,
    total: Some(3 * 256),
    of: "",
    tenant: 32,
    key: None,
    operators: 256,
    counted: "pdpd/src/api/connection.rs",
    test: ("pdpd/tests/access.rs", "connections_per_address_are_limited"),
    constants: &[
        ("pdpd/src/api/mod.rs", "CONNECTIONS_MAX"),
        ("pdpd/src/api/mod.rs", "CONNECTIONS_PER_PEER_MAX"),
    ],
};

/// Images being pulled or read from archives, or waiting for it.
pub const DOWNLOADS: SharedResource = SharedResource {
    name: "images being pulled or waiting to be",
    unit: ResourceUnit::Count,
    total: Some(128),
    of: "",
    tenant: 4,
    key: None,
    operators: 0,
    counted: "pdpd/src/images/mod.rs",
    test: ("pdpd/src/images/mod.rs", "pull_queue_is_limited_per_tenant"),
    constants: &[
        ("pdpd/src/images/mod.rs", "TENANT_LINE_MAX"),
        ("pdpd/src/images/mod.rs", "TENANTS_LINE_MAX"),
        ("pdpd/src/images/mod.rs", "PULLS_MAX"),
    ],
};

/// Row for a limit that the kernel or a helper enforces
/// for each guest, node or namespace separately.
const fn each(name: &'static str, tenant: u64, of: &'static str) -> SharedResource {
    SharedResource { key: None, ..quota(name, "", tenant, of) }
}

/// Resources that the kernel counts for all guests together.
const KERNEL: [SharedResource; 4] = [
    SharedResource {
        counted: "container/src/bundle.rs",
        test: ("container/tests/guests.rs", "greedy_guest_leaves_terminals_and_inotify_to_others"),
        constants: &[("container/src/bundle.rs", "TERMINALS_MAX")],
        ..each("pseudo-terminals of each guest", 64, "`kernel.pty.max`, raised to the guests' sum")
    },
    SharedResource {
        counted: "container/src/view.rs",
        test: ("container/tests/guests.rs", "greedy_guest_leaves_terminals_and_inotify_to_others"),
        constants: &[("container/src/view.rs", "INOTIFY_INSTANCES_MAX")],
        ..each(
            "inotify instances of each guest",
            128,
            "`fs.inotify.max_user_instances`, raised to a network's sum",
        )
    },
    SharedResource {
        counted: "net/src/limits.rs",
        test: ("e2e/tests/e2e/beside/stock_debian.rs", "no_guest_exhausts_shared_kernel_resources"),
        constants: &[("net/src/limits.rs", "LINKS_MAX")],
        ..each(
            "interfaces of each network namespace (with BPF LSM)",
            320,
            "time under the kernel's lock, a quarter for all owners",
        )
    },
    SharedResource {
        counted: "net/src/shared.rs",
        test: ("e2e/tests/e2e/beside/stock_debian.rs", "no_guest_exhausts_shared_kernel_resources"),
        constants: &[("net/src/shared.rs", "CONNECTIONS_MAX")],
        ..each("tracked connections of each network namespace", 16_384, "the kernel's memory")
    },
];

/// Work that the daemon and its helpers do for a tenant outside of its guests.
const OUTSIDE: [SharedResource; 5] = [
    SharedResource {
        unit: ResourceUnit::Cores,
        counted: "container/src/work.rs",
        test: ("container/tests/images.rs", "checking_an_image_is_charged_to_its_owner"),
        ..each(
            "CPU for reading, checking and unpacking images, and for new volumes",
            1000,
            "a tenth of a core in total while others need CPU",
        )
    },
    SharedResource {
        counted: "container/src/image/unpacked.rs",
        test: ("container/tests/images.rs", "owners_unpack_in_parallel_two_images_each"),
        constants: &[("container/src/image/unpacked.rs", "UNPACKING_MAX")],
        ..each("images unpacked at a time", 2, "")
    },
    SharedResource {
        counted: "management/src/udp.rs",
        test: ("management/src/udp.rs", "udp_sockets_per_node_are_bounded"),
        constants: &[("management/src/udp.rs", "FLOWS_MAX")],
        ..each(
            "outgoing UDP flows of each node with `management.outside`",
            256,
            "half of the machine's ephemeral ports, in equal parts if nodes need more",
        )
    },
    SharedResource {
        counted: "management/src/echo.rs",
        test: ("management/src/echo.rs", "echo_sockets_per_node_are_bounded"),
        constants: &[("management/src/echo.rs", "ECHOES_MAX")],
        ..each(
            "pinged addresses at a time of each node with `management.outside`",
            64,
            "half of the machine's 65535 echo identifiers, in equal parts if nodes need more",
        )
    },
    SharedResource {
        unit: ResourceUnit::Bytes,
        counted: "spec/src/usage.rs",
        test: ("e2e/tests/e2e/beside/boundaries.rs", "run_directory_stays_below_the_counted_size"),
        ..quota(
            "the run directory, counted with memory limits",
            "memory",
            TENANT_MEMORY_DEFAULT,
            "the file system of the run directory",
        )
    },
];

const DISK: &str = "the disk of the state directory";

/// All rows.
pub const ALL: [SharedResource; 38] = [
    VNETS,
    USER_IDS,
    SharedResource {
        test: QUOTA_TEST,
        ..quota("nodes", "nodes", TENANT_NODES_DEFAULT, "limited by other rows")
    },
    SharedResource {
        unit: ResourceUnit::Cores,
        test: QUOTA_TEST,
        ..quota(
            "power",
            "power",
            TENANT_POWER_DEFAULT,
            "the capacity of the forwarding engines, and half of the mux's power",
        )
    },
    SharedResource {
        unit: ResourceUnit::Cores,
        test: QUOTA_TEST,
        ..quota("CPU of hosts and control guests", "cpu", TENANT_CPU_DEFAULT, "the machine's CPUs")
    },
    SharedResource {
        unit: ResourceUnit::Bytes,
        ..quota("memory limits", "memory", TENANT_MEMORY_DEFAULT, "`managementHost.memory`")
    },
    quota("processes", "processes", TENANT_PROCESSES_DEFAULT, "`kernel.pid_max` of the machine"),
    SharedResource {
        test: QUOTA_TEST,
        ..quota("interfaces", "vports", TENANT_VPORTS_DEFAULT, "limited by other rows")
    },
    KERNEL_PORTS,
    SharedResource {
        test: QUOTA_TEST,
        ..quota("link rates", "rate", 0, "`capacity` of interfaces")
    },
    SharedResource {
        test: QUOTA_TEST,
        ..quota("routes", "routes", TENANT_ROUTES_DEFAULT, "memory")
    },
    SharedResource {
        unit: ResourceUnit::Bytes,
        test: QUOTA_TEST,
        ..quota(
            "specs",
            "specs",
            TENANT_SPECS_DEFAULT,
            "memory, and the disk of the state directory",
        )
    },
    SharedResource {
        unit: ResourceUnit::Bytes,
        ..quota("logs", "logs", TENANT_LOGS_DEFAULT, DISK)
    },
    SharedResource {
        unit: ResourceUnit::Bytes,
        ..quota(
            "volumes",
            "volumes",
            TENANT_VOLUMES_DEFAULT,
            "the same disk; a new volume leaves 256 MiB free",
        )
    },
    quota(
        "images in use by nodes",
        "ociImages",
        TENANT_OCI_IMAGES_DEFAULT,
        "the same disk; an image has 16 GiB at most",
    ),
    SharedResource {
        unit: ResourceUnit::Bytes,
        counted: "pdpd/src/images/mod.rs",
        test: ("container/tests/images.rs", "directories_count_for_blocks_and_inodes"),
        ..quota(
            "blocks of stored images, packed and unpacked",
            "images",
            TENANT_IMAGES_DEFAULT,
            "the same disk; unpacking leaves 256 MiB free",
        )
    },
    SharedResource {
        counted: "pdpd/src/images/mod.rs",
        test: ("container/tests/images.rs", "directories_count_for_blocks_and_inodes"),
        ..quota(
            "files and directories of stored images",
            "imageFiles",
            TENANT_IMAGE_FILES_DEFAULT,
            "the disk's inodes; unpacking leaves 5 % free",
        )
    },
    DOWNLOADS,
    quota(
        "descriptors",
        "descriptors",
        TENANT_DESCRIPTORS_DEFAULT,
        "`LimitNOFILE` of pdpd's service, less 2,432 for its API",
    ),
    SharedResource {
        total: Some(REGIONS_MAX),
        constants: &[
            ("spec/src/limits.rs", "REGIONS_MAX"),
            ("memif/src/sigbus.rs", "REGIONS_COUNT_MAX"),
        ],
        ..quota("memory regions mapped by the mux", "regions", TENANT_REGIONS_DEFAULT, "")
    },
    SharedResource {
        test: ("spec/tests/buffers.rs", "tenant_queues_obey_quota_without_revealing_others"),
        ..quota(
            "packets reserved by queues",
            "buffers",
            TENANT_BUFFERS_DEFAULT,
            "half of one mux worker's packets; with one worker 16,384",
        )
    },
    CAPTURES,
    TRACES,
    WORKERS,
    CALLS,
    SESSIONS,
    BODIES,
    CONNECTIONS,
    SharedResource {
        counted: "pdpd/src/intent/state/trail.rs",
        test: (
            "pdpd/src/intent/state/trail.rs",
            "audit_flood_evicts_neither_other_clients_nor_changes",
        ),
        constants: &[
            ("pdpd/src/intent/state/trail.rs", "NODE_ROWS_MAX"),
            ("pdpd/src/intent/state/trail.rs", "STRANGER_ROWS_MAX"),
        ],
        ..quota(
            "rows of the audit log of each type",
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

/// Begin and end markers of the table in docs/tenants.md.
pub const BEGIN: &str =
    "<!-- shared: begin; made by `cargo run -p pdp-spec --example publish` -->\n";
/// See [`BEGIN`].
pub const END: &str = "<!-- shared: end -->\n";

/// Returns the table of docs/tenants.md.
pub fn markdown() -> String {
    let mut text = "| resource | key of `quota` | per tenant, unless `quota` sets it | in total | \
                    of which for operators only |\n|---|---|---|---|---|\n"
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
