//! A case: commands for both routers, their frames, and the expected result.

use std::time::Duration;

use super::frames::{Host, V4, V6};

type Make = Box<dyn Fn(&Host) -> (usize, Vec<u8>)>;

/// Expected result.
pub enum Expect {
    /// The same frames from both.
    Same,
    /// The same packets on the same set of paths. Each router may choose a packet's path.
    SameWays,
    /// Output of each, in the words of [`super::seen::words`], and the row of docs/dataplane.md
    /// that explains the difference.
    Differs { row: &'static str, kernel: &'static str, pdp: &'static str },
}

/// Test case; see the module.
pub struct Case {
    pub name: String,
    pub setup: String,
    pub undo: String,
    /// In steps: state learned by the router in one step lasts in the next.
    pub frames: Vec<Vec<Make>>,
    pub expect: Expect,
    /// Ports that answer no ping.
    pub dead: Vec<usize>,
    /// True if neighbour requests are compared as well.
    pub asks: bool,
    /// Pause between setup and frames.
    pub wait: Duration,
    /// Additional time for late frames.
    pub after: Duration,
    /// Required kernel feature: a shell line that succeeds.
    pub needs: Option<&'static str>,
}

/// Makes a case of this name without frames, which expects the same output.
pub fn case(name: &str) -> Case {
    Case {
        name: name.into(),
        setup: String::new(),
        undo: String::new(),
        frames: vec![Vec::new()],
        expect: Expect::Same,
        dead: Vec::new(),
        asks: false,
        wait: Duration::ZERO,
        after: Duration::ZERO,
        needs: None,
    }
}

/// Case with one IPv4 packet: a datagram to 10.1.0.9, with some changes.
pub fn v4(name: &str, change: impl Fn(&mut V4, &Host) + 'static) -> Case {
    case(&format!("v4 {name}")).v4(change)
}

/// Case with one IPv6 packet, to fd00:1::9.
pub fn v6(name: &str, change: impl Fn(&mut V6, &Host) + 'static) -> Case {
    case(&format!("v6 {name}")).v6(change)
}

impl Case {
    /// Adds shell lines for both routers, before the frames. `MAC0` is eth0's MAC address. Routes
    /// that they add (`proto boot`) and nexthop objects are removed automatically.
    pub fn setup(mut self, lines: &str) -> Self {
        self.setup += lines;
        self.setup += "\n";
        self
    }

    /// Adds shell lines before the existing ones.
    pub fn setup_first(mut self, lines: &str) -> Self {
        self.setup.insert_str(0, &format!("{lines}\n"));
        self
    }

    /// Adds shell lines for both routers, after the frames.
    pub fn undo(mut self, lines: &str) -> Self {
        self.undo += lines;
        self.undo += "\n";
        self
    }

    pub fn v4(self, change: impl Fn(&mut V4, &Host) + 'static) -> Self {
        self.frame(move |host| {
            let mut packet = V4::new(host);
            change(&mut packet, host);
            packet.frame()
        })
    }

    pub fn v6(self, change: impl Fn(&mut V6, &Host) + 'static) -> Self {
        self.frame(move |host| {
            let mut packet = V6::new(host);
            change(&mut packet, host);
            packet.frame()
        })
    }

    /// Adds a frame into a port.
    pub fn frame(mut self, make: impl Fn(&Host) -> (usize, Vec<u8>) + 'static) -> Self {
        self.frames.last_mut().expect("a step").push(Box::new(make));
        self
    }

    /// Begins a new step: later frames are sent when the router has finished the earlier ones.
    pub fn then(mut self) -> Self {
        self.frames.push(Vec::new());
        self
    }

    /// Waits this long for late output.
    pub fn after_ms(mut self, ms: u64) -> Self {
        self.after = Duration::from_millis(ms);
        self
    }

    /// Skips the case unless this shell line succeeds.
    pub fn needs(mut self, line: &'static str) -> Self {
        self.needs = Some(line);
        self
    }

    pub fn differs(mut self, row: &'static str, kernel: &'static str, pdp: &'static str) -> Self {
        self.expect = Expect::Differs { row, kernel, pdp };
        self
    }

    pub fn same_ways(mut self) -> Self {
        self.expect = Expect::SameWays;
        self
    }

    pub fn dead(mut self, ports: &[usize]) -> Self {
        self.dead = ports.to_vec();
        self
    }

    pub fn wait_ms(mut self, ms: u64) -> Self {
        self.wait = Duration::from_millis(ms);
        self
    }

    pub fn asks(mut self) -> Self {
        self.asks = true;
        self
    }
}
