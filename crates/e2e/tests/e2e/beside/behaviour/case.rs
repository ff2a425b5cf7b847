//! A case: what both routers are told, the frames that they get, and what is expected of them.

use std::time::Duration;

use super::frames::{Host, V4, V6};

type Make = Box<dyn Fn(&Host) -> (usize, Vec<u8>)>;

/// What is expected.
pub enum Expect {
    /// The same frames from both.
    Same,
    /// The same packets by the same ways; which packet takes which is each router's choice.
    SameWays,
    /// What each does, in the words of [`super::seen::words`], and the row of docs/dataplane.md that
    /// says so.
    Differs { row: &'static str, kernel: &'static str, pdp: &'static str },
}

/// See the module.
pub struct Case {
    pub name: String,
    pub setup: String,
    pub undo: String,
    /// In steps: what the router learns in one holds in the next.
    pub frames: Vec<Vec<Make>>,
    pub expect: Expect,
    /// Ports that answer no ping.
    pub dead: Vec<usize>,
    /// Requests for neighbours count as well.
    pub asks: bool,
    /// Between setup and frames.
    pub wait: Duration,
    /// For late frames.
    pub after: Duration,
    /// What the kernel must have: a shell line that succeeds.
    pub needs: Option<&'static str>,
}

/// A case of this name, which is expected to be the same; it has no frames yet.
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

/// A case with one packet of IPv4: a datagram to 10.1.0.9, but for what is changed.
pub fn v4(name: &str, change: impl Fn(&mut V4, &Host) + 'static) -> Case {
    case(&format!("v4 {name}")).v4(change)
}

/// The same with IPv6, to fd00:1::9.
pub fn v6(name: &str, change: impl Fn(&mut V6, &Host) + 'static) -> Case {
    case(&format!("v6 {name}")).v6(change)
}

impl Case {
    /// Shell lines for both routers, before the frames; `MAC0` is eth0's link address. Routes that they add (`proto boot`) and
    /// nexthop objects go afterwards by themselves.
    pub fn setup(mut self, lines: &str) -> Self {
        self.setup += lines;
        self.setup += "\n";
        self
    }

    /// Shell lines before those that there are.
    pub fn setup_first(mut self, lines: &str) -> Self {
        self.setup.insert_str(0, &format!("{lines}\n"));
        self
    }

    /// Shell lines for both routers, after the frames.
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

    /// A frame into a port.
    pub fn frame(mut self, make: impl Fn(&Host) -> (usize, Vec<u8>) + 'static) -> Self {
        self.frames.last_mut().expect("a step").push(Box::new(make));
        self
    }

    /// What is sent from here on is sent when the router has done all that was to be done before.
    pub fn then(mut self) -> Self {
        self.frames.push(Vec::new());
        self
    }

    /// More comes out as late as this.
    pub fn after_ms(mut self, ms: u64) -> Self {
        self.after = Duration::from_millis(ms);
        self
    }

    /// Can be judged where this shell line succeeds.
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
