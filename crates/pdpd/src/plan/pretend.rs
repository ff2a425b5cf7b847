//! Plans a router with a pretend data plane, which takes something of
//! everything: the plan follows from its needs, and from nothing else.

use std::collections::{BTreeMap, BTreeSet};

use pdp_proto::{mirror, mux};
use pdp_spec::units::Cores;
use pdp_spec::{
    DataPlaneNeeds, EngineDemand, KernelHooks, Plane, PuntClass, PuntFilter, PuntLimits, Punts,
    SourceFile, Substrate, XdpBypass,
};

use super::allocations::{EnginePlacement, VnetAllocation};
use super::node::NodePlanner;
use super::{DaemonPaths, NodePlan, VnetPlanner, kernel_links};

const VNET: &str = "
apiVersion: pdp/v1
kind: VirtualNetwork
metadata: {name: red}
spec: {nodes: {r1: {kind: router, interfaces: {eth0: {}}}}}
";

/// The mux and the kernel forward at the same time.
#[derive(Debug)]
struct PretendPlane {
    punt: PuntFilter,
    limits: PuntLimits,
    kernel: Option<XdpBypass>,
}

impl Plane for PretendPlane {
    fn name(&self) -> &'static str {
        "pretend"
    }

    fn forwarder(&self) -> &'static str {
        "nothing"
    }

    fn needs(&self) -> DataPlaneNeeds<'_> {
        DataPlaneNeeds {
            engines: Some(EngineDemand {
                power: Some(Cores(300)),
                borrows: true,
                shares: Some(2),
                split: false,
            }),
            mux_routes: true,
            slowpath: Some((1000, 0)),
            mux_millicores: 100,
            punts: Some(Punts {
                filters: std::slice::from_ref(&self.punt),
                limits: &self.limits,
                hooks: KernelHooks::Ignore,
            }),
            kernel: self.kernel,
            ..DataPlaneNeeds::default()
        }
    }
}

/// Plans the router with this data plane, or with its spec's. Returns its part of the mux, too.
fn planned(plane: Option<&dyn Plane>) -> (NodePlan, mux::NodeConfig) {
    let file = SourceFile { name: "f".into(), text: VNET.into(), ..SourceFile::default() };
    let cpus: BTreeSet<u32> = (0..3).collect();
    let existing = pdp_spec::Existing {
        substrate: Some(Substrate::of_machine(&cpus)),
        cpus,
        ..Default::default()
    };
    let vnet =
        &pdp_spec::check(&pdp_spec::parse(&[file]).unwrap(), &existing).unwrap().vnets["red"];
    let share = |power_millicores| EnginePlacement { engine: "fe1".into(), power_millicores };
    let shares = BTreeMap::from([(0, share(100)), (1, share(200))]);
    let guests = BTreeMap::from([("r1".to_owned(), shares)]);
    let paths = DaemonPaths { run: "/run".into(), lib: "/lib".into(), pins: "/pins".into() };
    let planner = VnetPlanner {
        places: &paths,
        substrate: &existing.substrate.unwrap().spec,
        name: "red",
        spec: &vnet.spec,
        uid: 1000,
        allocation: &VnetAllocation { guests, ..VnetAllocation::default() },
        kernel_tunnels: Vec::new(),
    };
    let node = &vnet.spec.nodes["r1"];
    let plane = plane.or_else(|| node.plane().map(|plane| &**plane));
    let planner = NodePlanner { vnet: &planner, name: "r1", node, plane };
    let plan = planner.plan().unwrap();
    let part = planner.mux_node(&plan);
    (plan, part)
}

#[test]
fn a_pretend_kind_is_planned() {
    let limits = PuntLimits::default();
    let punt = PuntFilter { matches: Vec::new(), class: PuntClass::Hook };
    let mut plane = PretendPlane { punt, limits, kernel: Some(XdpBypass::Strict) };
    let (plan, part) = planned(Some(&plane));
    let (before, of_guests) = planned(None);
    // It has no forwarding guests, which the default has. The control guest stays the same.
    assert_eq!((plan.guests.len(), before.guests.len()), (0, 2));
    assert_eq!((&plan.control, &plan.hash), (&before.control, &before.hash));
    // The mirror, its directory, and the mux's engine.
    let mirror = plan.mirror.as_ref().unwrap();
    assert_eq!(mirror.config.hooks, mirror::HookPolicy::Ignore);
    assert!(
        plan.directories
            .iter()
            .any(|it| it.path.ends_with("r1/routes") && it.gid == super::MUX_UID)
    );
    let engine = plan.engine.as_ref().unwrap();
    let routes = mirror.config.routes_socket.clone();
    assert_eq!(engine.code, mux::EngineCode::Ip { routes });
    assert_eq!(engine.power, mux::POWER_WHOLE / 10);
    let slowpath = engine.slowpath.as_ref().unwrap();
    assert_eq!((slowpath.filters, slowpath.counters), (1000, 0));
    assert_eq!((plan.mux_millicores, plan.followers(), plan.is_kernels()), (100, 1, false));
    // The kernel's share.
    let kernel = plan.kernel.as_ref().unwrap();
    assert!(
        kernel.borrows && !kernel.xdp_bypass && kernel.limits.cpu_cores.is_none(),
        "{kernel:?}"
    );
    assert_eq!(plan.placements().map(|share| share.power_millicores).collect::<Vec<_>>(), [100]);
    // Its part of the mux.
    let (router, other) = (part.router.unwrap(), of_guests.router.unwrap());
    assert_eq!((router.guests.len(), other.guests.len()), (0, 2));
    assert_eq!((router.punt_filters.len(), other.punt_filters.len()), (1, 0));
    assert_eq!((router.engine.as_ref(), other.engine), (Some(engine), None));
    // Its links stay in the kernel only if the kernel forwards.
    assert_eq!(kernel_links::of_other_kind(&plane), None);
    plane.kernel = None;
    let words = kernel_links::of_other_kind(&plane);
    assert_eq!(words.as_deref(), Some("a router of kind pretend"));
    assert!(planned(Some(&plane)).0.kernel.is_none());
}
