//! Network namespaces for tests.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::Command;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Network namespace, deleted when dropped.
pub struct Namespace(String);

impl Namespace {
    /// Makes a namespace. Each test needs its own name.
    pub fn new(name: &str) -> Self {
        let name = format!("pdp-{name}-{}", std::process::id());
        ip(&["netns", "add", &name]);
        Self(name)
    }

    /// Runs `ip` there.
    pub fn run(&self, words: &str) {
        ip(&[&["-n", &self.0], &words.split(' ').collect::<Vec<_>>()[..]].concat());
    }

    /// Runs `act` in a thread there and returns its result.
    pub fn within<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        let file = File::open(format!("/run/netns/{}", self.0)).unwrap();
        let within = || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            act()
        };
        std::thread::scope(|scope| scope.spawn(within).join().unwrap())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        ip(&["netns", "del", &self.0]);
    }
}

fn ip(words: &[&str]) {
    let output = Command::new("ip").args(words).output().unwrap();
    assert!(output.status.success(), "ip {words:?}: {output:?}");
}
