//! Checks of the substrate by itself and against the machine.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::{Existing, Reporter, bad_name, name_hint};
use crate::frames;
use crate::limits::{ENGINES_MAX, FRAME_BYTES_MAX, INTERFACES_MAX, POWER_MILLICORES_MIN};
use crate::nearest::nearest;
use crate::object::{ExternalForm, Generator, Substrate};
use crate::units::{Cores, CpuSet};

/// Bytes of a generator's sequence number, including its mark.
const NUMBER_BYTES: usize = 12;

pub(super) fn check(substrate: &Substrate, existing: &Existing, reporter: &mut Reporter) {
    interfaces(substrate, existing, reporter);
    let spec = &substrate.spec;
    let count = spec.forwarding_engines.len();
    if count > ENGINES_MAX {
        let message = format!("{count} forwarding engines exceed {ENGINES_MAX}");
        reporter.substrate(&["spec", "forwardingEngines"], message, "remove some");
        return;
    }
    if spec.mux.cpus.0.is_empty() {
        let hint = "give it its cpus, or leave forwardingEngines out as well";
        reporter.substrate(&["spec"], "mux is missing", hint);
        return;
    }
    let mux = ["spec", "mux", "cpus"];
    let mut all_exist = cpus_exist(&spec.mux.cpus, &mux, existing, reporter);
    if let Some(cpus) = spec.management_host.as_ref().and_then(|host| host.cpus.as_ref()) {
        cpus_exist(cpus, &["spec", "managementHost", "cpus"], existing, reporter);
    }
    for (name, engine) in &spec.forwarding_engines {
        let path = ["spec", "forwardingEngines", name];
        if let Some(why) = bad_name(name) {
            reporter.substrate(&path, format!("name {name:?} {why}"), name_hint(name));
        }
        let cpus = ["spec", "forwardingEngines", name, "cpus"];
        all_exist &= cpus_exist(&engine.cpus, &cpus, existing, reporter);
        if engine.capacity.0 < POWER_MILLICORES_MIN {
            let message =
                format!("capacity {} is below {}", engine.capacity, Cores(POWER_MILLICORES_MIN));
            let path = ["spec", "forwardingEngines", name, "capacity"];
            reporter.substrate(&path, message, "give it more");
        }
    }
    if all_exist {
        cpu_power(substrate, reporter);
    }
}

fn interfaces(substrate: &Substrate, existing: &Existing, reporter: &mut Reporter) {
    let interfaces = &substrate.spec.interfaces;
    if interfaces.len() > INTERFACES_MAX {
        let message = format!("{} interfaces exceed {INTERFACES_MAX}", interfaces.len());
        reporter.substrate(&["spec", "interfaces"], message, "remove some");
    }
    let mut devices: BTreeMap<&str, &str> = BTreeMap::new();
    for (name, interface) in interfaces {
        // Upper case is allowed: the paper's interfaces are A and B.
        if let Some(why) = bad_name(&name.to_lowercase()) {
            let hint = "use letters, digits and -, with a letter or digit first and last";
            let path = ["spec", "interfaces", name];
            reporter.substrate(&path, format!("name {name:?} {why}"), hint);
        }
        let forms = [
            ("device", interface.device.is_some()),
            ("memif", interface.memif.is_some()),
            ("generator", interface.generator.is_some()),
        ];
        let given: Vec<&str> = forms.iter().filter(|form| form.1).map(|form| form.0).collect();
        if given.len() != 1 {
            let message = match given.as_slice() {
                [] => "none of device, memif and generator is given".to_owned(),
                several => format!("interface has {}", several.join(" and ")),
            };
            let hint = "give one of device: NAME, memif: {}, generator: {…}";
            reporter.substrate(&["spec", "interfaces", name], message, hint);
        }
        if interface.attach.is_some() && interface.device.is_none() {
            let path = ["spec", "interfaces", name, "attach"];
            reporter.substrate(&path, "attach without device", "remove it");
        }
        match interface.outlet() {
            Some(ExternalForm::Device(device, _)) => {
                self::device(name, device, &mut devices, existing, reporter);
            }
            Some(ExternalForm::Generator(settings)) => generator(name, settings, reporter),
            Some(ExternalForm::Memif(_)) | None => {}
        }
    }
}

fn device<'a>(
    name: &'a str,
    device: &'a str,
    devices: &mut BTreeMap<&'a str, &'a str>,
    existing: &Existing,
    reporter: &mut Reporter,
) {
    let path = ["spec", "interfaces", name, "device"];
    if device.contains(|c: char| c == '/' || c == ':' || c.is_whitespace()) {
        let message = format!("device {device:?} is not a name of a network device");
        reporter.substrate(&path, message, "see `ip link`");
    }
    if let Some(known) = &existing.devices
        && !known.contains_key(device)
    {
        let hint = match nearest(device, known.keys().map(String::as_str)) {
            Some(nearest) => format!("did you mean {nearest}?"),
            None => "create it first; `ip link` lists devices".into(),
        };
        reporter.substrate(&path, format!("device {device} does not exist"), hint);
    }
    if let Some(other) = devices.insert(device, name) {
        let message = format!("device {device} is taken by external interface {other}");
        reporter.substrate(&path, message, "give each interface a device of its own");
    }
}

fn generator(name: &str, generator: &Generator, reporter: &mut Reporter) {
    let mut fault = |key: &str, message: String, hint: &str| {
        reporter.substrate(&["spec", "interfaces", name, "generator", key], message, hint);
    };
    // The number must fit into the shortest frame to send, or the longest that can arrive.
    let mut room = FRAME_BYTES_MAX;
    match &generator.pcap {
        Some(pcap) => match frames::read(&pcap.0) {
            Ok(frames) => room = frames.iter().map(|frame| frame.len()).min().unwrap_or(room),
            Err(bad) => fault("pcap", format!("pcap {bad}"), "give frames of Ethernet"),
        },
        None => {
            for (key, given) in [("pps", generator.pps), ("count", generator.count)] {
                if given.is_some() {
                    fault(key, format!("{key} without frames"), "add frames: FILE");
                }
            }
        }
    }
    if let Some(at) = generator.number_at {
        let end = usize::from(at) + NUMBER_BYTES;
        if end > room {
            let message =
                format!("numberAt {at}: the number ends at byte {end}, a frame at {room}");
            fault("numberAt", message, "lower it, or send longer frames");
        }
    }
}

fn cpus_exist(cpus: &CpuSet, path: &[&str], existing: &Existing, reporter: &mut Reporter) -> bool {
    if existing.cpus.is_empty() {
        return true;
    }
    let missing: BTreeSet<u32> = cpus.0.difference(&existing.cpus).copied().collect();
    if missing.is_empty() {
        return true;
    }
    let has = CpuSet(existing.cpus.clone());
    let message = format!("cpus {cpus}: this machine has no CPU {}", CpuSet(missing));
    reporter.substrate(path, message, format!("it has {has}"));
    false
}

/// Checks that the CPUs have the power of the mux and the engines.
fn cpu_power(substrate: &Substrate, reporter: &mut Reporter) {
    let spec = &substrate.spec;
    let mux = &spec.mux;
    let power = mux.power();
    let workers = Cores(mux.workers * 1000);
    if power > workers || power.0 < POWER_MILLICORES_MIN {
        let bound = if power > workers {
            format!("exceeds the {workers} that {} can use", crate::count(mux.workers, "worker"))
        } else {
            format!("is below {}", Cores(POWER_MILLICORES_MIN))
        };
        let message = format!("power {power} {bound}");
        reporter.substrate(&["spec", "mux", "power"], message, "change power or workers");
    }
    let mut cpus = CpuPower::default();
    let got = cpus.give(&mux.cpus, power.0);
    if got < power.0 {
        let message = format!("power {power} exceeds the {} of its CPUs {}", Cores(got), mux.cpus);
        let hint = "give it more CPUs, fewer workers, or less power";
        reporter.substrate(&["spec", "mux", "power"], message, hint);
    }
    for (name, engine) in &spec.forwarding_engines {
        let got = cpus.give(&engine.cpus, engine.capacity.0);
        if got < engine.capacity.0 {
            let message = format!(
                "capacity {} exceeds the {} that its CPUs {} leave beside the mux and other engines",
                engine.capacity,
                Cores(got),
                engine.cpus
            );
            let hint = "lower the capacity, or the mux's power, or give it other CPUs";
            reporter.substrate(&["spec", "forwardingEngines", name, "capacity"], message, hint);
        }
    }
}

/// Power of CPUs, 1000 millicores each, allocated to users that may run on several CPUs.
/// Allocations move between a user's CPUs to make space for the next user: a maximum flow.
#[derive(Default)]
struct CpuPower {
    /// By user, then CPU.
    given: Vec<BTreeMap<u32, u32>>,
    /// By CPU.
    used: BTreeMap<u32, u32>,
    allowed: Vec<BTreeSet<u32>>,
}

impl CpuPower {
    /// Allocates up to `millicores` to one more user; returns the amount.
    fn give(&mut self, cpus: &CpuSet, millicores: u32) -> u32 {
        let user = self.given.len();
        self.given.push(BTreeMap::new());
        self.allowed.push(cpus.0.clone());
        let mut got = 0;
        while got < millicores {
            let moved = self.augment(user, millicores - got);
            if moved == 0 {
                break;
            }
            got += moved;
        }
        got
    }

    /// Finds one augmenting path: `user` gets space on a CPU, and other users move to other CPUs.
    fn augment(&mut self, user: usize, millicores: u32) -> u32 {
        // How each CPU was reached: the user that would get
        // power there, and the CPU that this user would free.
        let mut reached: BTreeMap<u32, (usize, Option<u32>)> = BTreeMap::new();
        let mut queue = VecDeque::new();
        for &cpu in &self.allowed[user] {
            reached.insert(cpu, (user, None));
            queue.push_back(cpu);
        }
        while let Some(cpu) = queue.pop_front() {
            let free = 1000 - self.used.get(&cpu).copied().unwrap_or(0);
            if free > 0 {
                return self.shift(&reached, cpu, millicores.min(free));
            }
            for (other, given) in self.given.iter().enumerate() {
                if given.get(&cpu).is_none_or(|&amount| amount == 0) {
                    continue;
                }
                for &next in &self.allowed[other] {
                    if let std::collections::btree_map::Entry::Vacant(entry) = reached.entry(next) {
                        entry.insert((other, Some(cpu)));
                        queue.push_back(next);
                    }
                }
            }
        }
        0
    }

    /// Moves as much of `amount` as the path to `last` allows.
    fn shift(
        &mut self,
        reached: &BTreeMap<u32, (usize, Option<u32>)>,
        last: u32,
        mut amount: u32,
    ) -> u32 {
        let mut steps = Vec::new();
        let mut cpu = last;
        while let Some(&(user, left)) = reached.get(&cpu) {
            steps.push((user, cpu, left));
            match left {
                Some(before) => {
                    amount = amount.min(self.given[user].get(&before).copied().unwrap_or(0));
                    cpu = before;
                }
                None => break,
            }
        }
        *self.used.entry(last).or_default() += amount;
        for (user, to, from) in steps {
            *self.given[user].entry(to).or_default() += amount;
            if let Some(source) = from.and_then(|from| self.given[user].get_mut(&from)) {
                *source -= amount;
            }
        }
        amount
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpus(text: &str) -> CpuSet {
        text.parse().unwrap()
    }

    #[test]
    fn power_moves_to_free_cpus_without_overcommitment() {
        let mut power = CpuPower::default();
        assert_eq!(power.give(&cpus("0-2"), 1000), 1000);
        // The first user moves off CPU 0, and later moves find nothing there.
        assert_eq!(power.give(&cpus("0"), 1000), 1000);
        assert_eq!(power.give(&cpus("0"), 500), 0);
        assert_eq!(power.give(&cpus("0-2"), 1500), 1000);
    }
}
