//! Guests as small machines: they have what servers and clients of the machine's `/usr` need, and
//! nothing of the machine's own.

use super::*;

use pdp_container::{CommandProbe, GuestCommandStatus, Probe};

const MACHINES: [Profile; 2] = [Profile::Control, Profile::Host];

/// Returns false and prints a message if the machine lacks a program.
fn has(program: &str) -> bool {
    let exists = Path::new(program).exists();
    if !exists {
        eprintln!("not tested: {program} is not on this machine; see scripts/install-deps");
    }
    exists
}

fn words(fixture: &Fixture, spec: &GuestSpec, index: usize) -> String {
    let statuses: Vec<GuestCommandStatus> = fixture.runtime.commands(&spec.dir).unwrap().unwrap();
    statuses[index].words.clone()
}

#[test]
fn guest_etc_is_complete_without_machine_secrets() {
    let fixture = Fixture::new();
    for profile in MACHINES {
        let spec = fixture.spec(profile, &[&["sleep", "1000"]]);
        fixture.run(&spec);
        let output = |script: &str| fixture.exec(&spec, script).1;
        for path in
            ["/etc/fstab", "/etc/skel", "/etc/profile.d", "/var/log/lastlog", "/var/log/wtmp"]
        {
            assert_eq!(output(&format!("ls -d {path}")), format!("{path}\n"), "{profile:?}");
        }
        assert_eq!(
            output("stat -c '%a %U %G' /etc/shadow /etc/gshadow"),
            "640 root shadow\n".repeat(2)
        );
        assert_eq!(output("stat -c '%a %U %G' /var/log/lastlog"), "664 root utmp\n");
        // Empty directories of the machine's packages, with their owners.
        let state = "cd /var; find lib cache log spool -mindepth 1 -maxdepth 1 -type d | sort";
        let inside = output(state);
        let machine = fs::read_dir("/var/lib").unwrap().flatten();
        let dirs = machine.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        for name in dirs.map(|entry| entry.file_name().into_string().unwrap()) {
            let left_out = ["apt", "debconf", "dpkg"].contains(&&*name) || name.starts_with("pdp");
            assert_eq!(inside.contains(&format!("lib/{name}\n")), !left_out, "{name} in {inside}");
        }
        let mode = |text: String| text.trim().to_owned();
        let of_machine =
            std::process::Command::new("stat").args(["-c", "%a %u %g", "/var/lib/misc"]).output();
        let of_machine = String::from_utf8(of_machine.unwrap().stdout).unwrap();
        assert_eq!(mode(output("stat -c '%a %u %g' /var/lib/misc")), mode(of_machine));
        assert_eq!(output("find /var -type f | sort"), "/var/log/lastlog\n/var/log/wtmp\n");
        // Nothing that belongs only to the machine.
        assert_eq!(
            output("ls -A /etc/ssh | sort"),
            if has("/usr/sbin/sshd") { "sshd_config\n" } else { "" }
        );
        assert_eq!(
            output("ls -d /etc/ssl/private /etc/sudoers /etc/dhcp/dhcpd.conf 2>/dev/null"),
            ""
        );
        assert_eq!(output("grep -rls 'PRIVATE KEY' /etc"), "", "{profile:?}");
        fixture.runtime.delete(&spec.dir).unwrap();
    }
}

/// Programs find trusted certificates. A server's own certificate is not among them until the node
/// adds it.
#[test]
fn programs_trust_the_machines_certificates() {
    const SERVE: &str = "ip link set lo up; cd /tmp; \
        openssl req -x509 -newkey rsa:2048 -nodes -keyout key -out cert -days 1 -subj /CN=localhost \
            -addext subjectAltName=DNS:localhost 2>/dev/null; \
        (openssl s_server -accept 4433 -key key -cert cert -www >/dev/null 2>&1 &) ; \
        for i in $(seq 50); do curl -sk -m 5 -o /dev/null https://localhost:4433/ && break; sleep 0.1; done; \
        curl -sS -m 5 https://localhost:4433/ 2>&1 | head -1; \
        curl -sS -m 5 --cacert cert -o /dev/null -w '%{http_code}\\n' https://localhost:4433/; \
        python3 -c 'import ssl; print(len(ssl.create_default_context(cafile=\"/etc/ssl/certs/ca-certificates.crt\").get_ca_certs()) > 50)'; \
        ls /etc/ssl/certs | wc -l; ls /etc/ssl/certs/own.pem";
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Host, &[&["sleep", "1000"]]);
    for own in [false, true] {
        if own {
            // An additional certificate makes it a copy, which has the others too.
            spec.files = vec![file("/etc/ssl/certs/own.pem", "x", false)];
        }
        fixture.run(&spec);
        let (good, text) = fixture.exec(&spec, SERVE);
        let lines: Vec<_> = text.lines().collect();
        assert!(lines[0].starts_with("curl: (60)"), "{text}");
        assert_eq!(lines[1..3], ["200", "True"], "{text}");
        assert!(lines[3].parse::<u32>().unwrap() > 100 && good == own, "{text}");
        fixture.runtime.delete(&spec.dir).unwrap();
    }
}

#[test]
fn sshd_accepts_key_login_with_own_host_key() {
    if !has("/usr/sbin/sshd") {
        return;
    }
    let fixture = Fixture::new();
    for profile in MACHINES {
        let mut spec = fixture.spec(profile, &[&["/usr/sbin/sshd", "-D"]]);
        fixture.run(&spec);
        let script = "ip link set lo up; ssh-keygen -q -t ed25519 -N '' -f /root/key; \
            install -D -m 600 /root/key.pub /root/.ssh/authorized_keys; \
            ssh='-i /root/key -o BatchMode=yes -o StrictHostKeyChecking=no -o LogLevel=ERROR'; \
            for i in $(seq 50); do ssh $ssh 127.0.0.1 true && break; sleep 0.1; done; \
            ssh $ssh -tt 127.0.0.1 'id -u; tty; stat -c %a /etc/ssh/ssh_host_ed25519_key'; \
            echo put /root/key.pub /root/copy | sftp -q $ssh -b - 127.0.0.1 >/dev/null; \
            ls /root/copy";
        let (good, text) = fixture.exec(&spec, script);
        assert!(good && text.contains("0\r\n/dev/pts/"), "{profile:?}: {text} {}", log(&spec.dir));
        assert!(text.contains("600\r\n") && text.ends_with("/root/copy\n"), "{profile:?}: {text}");
        let key = fixture.exec(&spec, "cat /etc/ssh/ssh_host_ed25519_key.pub").1;
        let machine = fs::read_to_string("/etc/ssh/ssh_host_ed25519_key.pub").unwrap_or_default();
        assert!(
            key.starts_with("ssh-ed25519 ") && key.split(' ').nth(1) != machine.split(' ').nth(1)
        );
        fixture.runtime.delete(&spec.dir).unwrap();
        // A key of the spec stays unchanged.
        spec.files = vec![file("/etc/ssh/ssh_host_ed25519_key", "own", false)];
        fixture.run(&spec);
        assert_eq!(fixture.exec(&spec, "cat /etc/ssh/ssh_host_ed25519_key").1, "own");
        fixture.runtime.delete(&spec.dir).unwrap();
    }
}

#[test]
fn routing_software_runs_in_hosts_too() {
    let fixture = Fixture::new();
    let spec = fixture.spec(
        Profile::Host,
        &[&["/usr/lib/frr/zebra", "-A", "127.0.0.1"], &["/usr/lib/frr/staticd", "-A", "127.0.0.1"]],
    );
    fixture.run(&spec);
    eventually("zebra answers", || fixture.exec(&spec, "vtysh -c 'show version'").0);
    let (good, text) =
        fixture.exec(&spec, "vtysh -c 'configure terminal' -c 'ip route 10.9.0.0/16 blackhole'");
    assert!(good, "{text}");
    eventually("the route is in the kernel", || {
        fixture.exec(&spec, "ip route show 10.9.0.0/16").1.contains("blackhole")
    });
    assert_eq!(fixture.exec(&spec, "cat /proc/sys/net/ipv4/ip_forward").1, "0\n");
}

#[test]
fn hosts_and_control_guests_have_the_same_capabilities() {
    let fixture = Fixture::new();
    let sets = MACHINES.map(|profile| {
        let spec = fixture.spec(profile, &[&["sleep", "1000"]]);
        fixture.run(&spec);
        let (good, text) = fixture.exec(
            &spec,
            "grep CapEff /proc/self/status; mkdir /tmp/r; chroot / true; mount -t tmpfs none /mnt; \
             unshare -m true; echo x > /proc/sys/kernel/core_pattern; mknod /tmp/null c 1 3; \
             nsenter -t 1 -n true; echo end",
        );
        assert!(good && !text.contains("chroot"), "{text}");
        for word in ["mount:", "unshare:", "core_pattern:", "mknod:", "nsenter:"] {
            assert!(text.contains(word), "{word} {text}");
        }
        fixture.runtime.delete(&spec.dir).unwrap();
        text.lines().find(|line| line.starts_with("CapEff")).map(str::to_owned)
    });
    assert_eq!(sets[0], sets[1]);
    // CHOWN, DAC_OVERRIDE, FOWNER, KILL, SETGID, SETUID, NET_BIND_SERVICE, NET_ADMIN, NET_RAW,
    // SYS_CHROOT, SYS_ADMIN.
    let bits = [0, 1, 3, 5, 6, 7, 10, 12, 13, 18, 21];
    let want: u64 = bits.iter().map(|bit| 1 << bit).sum();
    assert_eq!(sets[0].as_deref(), Some(&*format!("CapEff:\t{want:016x}")));
}

#[test]
fn non_root_users_can_bind_low_ports() {
    let fixture = Fixture::new();
    for profile in MACHINES {
        let spec = fixture.spec(profile, &[&["sleep", "1000"]]);
        fixture.run(&spec);
        let run_as = RunAs { user: Some("nobody".into()), workdir: None };
        let bind = "import socket; socket.create_server(('', 80)); print('bound')";
        let (good, text) = fixture.exec_as(&spec, &run_as, &["python3", "-c", bind]);
        assert!(good && text == "bound\n", "{profile:?}: {text}");
        fixture.runtime.delete(&spec.dir).unwrap();
    }
}

/// The kernel charges the queue of a tunnel interface to nobody.
#[test]
fn tun_devices_need_the_packet_rings_permission() {
    let fixture = Fixture::new();
    for (profile, rings) in MACHINES.into_iter().flat_map(|it| [(it, true), (it, false)]) {
        let mut spec = fixture.spec(profile, &[&["sleep", "1000"]]);
        spec.packet_rings = rings;
        fixture.run(&spec);
        let (good, text) = fixture.exec(
            &spec,
            "ip tuntap add tun0 mode tun && ip link set tun0 up && ip -br link show tun0 && \
             stat -c '%t %T' /dev/net/tun",
        );
        assert_eq!(good, rings, "{profile:?}: {text}");
        match rings {
            true => assert!(text.starts_with("tun0") && text.ends_with("a c8\n"), "{text}"),
            false => assert!(text.contains("No such file"), "{text}"),
        }
        assert!(!Path::new("/sys/class/net/tun0").exists());
        fixture.runtime.delete(&spec.dir).unwrap();
    }
}

#[test]
fn kernel_kill_is_reported_with_its_cause() {
    const I386: &str = "import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex('b814000000cd80c3'))
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()";
    let fixture = Fixture::new();
    let mut spec = fixture.spec(
        Profile::Host,
        &[
            &["python3", "-c", I386],
            &["python3", "-c", "x = bytearray(512 << 20)"],
            &["sh", "-c", "kill -9 $$"],
        ],
    );
    spec.limits.memory_bytes = Some(64 << 20);
    fixture.run(&spec);
    eventually("all have ended", || (0..3).all(|index| !words(&fixture, &spec, index).is_empty()));
    assert_eq!(
        words(&fixture, &spec, 0),
        "ended by signal 31 (SIGSYS): a system call that nodes may not make, such as those of 32-bit programs"
    );
    assert_eq!(words(&fixture, &spec, 1), "ended by signal 9, out of memory (resources.memory)");
    assert!(words(&fixture, &spec, 2).starts_with("ended by signal 9"));
    assert!(fixture.runtime.cgroups().usage("red/r1").unwrap().memory_kills > 0);
}

#[test]
fn refused_threads_are_counted() {
    let fixture = Fixture::new();
    let threads = "import threading, time
for _ in range(400): threading.Thread(target=time.sleep, args=(600,)).start()";
    let mut spec = fixture.spec(Profile::Host, &[&["python3", "-c", threads]]);
    spec.limits.processes = Some(64);
    fixture.run(&spec);
    let refused = || fixture.runtime.limit_hits(&spec.dir).unwrap().processes_refused;
    eventually("one is refused", || refused() > 0);
    assert!(fixture.runtime.cgroups().usage("red/r1").unwrap().processes_refused > 0);
    // The new limit has refused nothing.
    let more = Limits { processes: Some(512), ..Limits::default() };
    fixture.runtime.update_limits(&spec.dir, &more).unwrap();
    assert_eq!(refused(), 0);
}

#[test]
fn forwarding_guest_reports_why_it_ended() {
    let fixture = Fixture::new();
    for (command, expected) in [
        (&["sh", "-c", "echo begins; echo boom >&2; exit 3"][..], "boom"),
        (&["/no/such"], "/no/such can't be started: No such file or directory (os error 2)"),
    ] {
        let spec = fixture.spec(Profile::Forwarding { tap: false }, &[command]);
        fixture.run(&spec);
        let state = || fixture.runtime.state(&spec.dir).unwrap();
        eventually("it has ended", || matches!(state(), ProcessState::Exited(_)));
        assert_eq!(fixture.runtime.last_words(&spec.dir).as_deref(), Some(expected));
        fixture.runtime.delete(&spec.dir).unwrap();
    }
}

#[test]
fn too_little_memory_to_start_is_reported() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(Profile::Host, &[&["sleep", "1000"]]);
    spec.limits.memory_bytes = Some(1 << 20);
    let error = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
    assert!(
        error.contains("it ran out of memory while starting (resources.memory: 16 MiB"),
        "{error}"
    );
    assert!(!spec.dir.exists() && !fixture.runtime.cgroups().exists("red"));
    // This is enough, every time.
    spec.limits.memory_bytes = Some(16 << 20);
    for _ in 0..5 {
        fixture.run(&spec);
        assert!(fixture.exec(&spec, "true").0);
        fixture.runtime.delete(&spec.dir).unwrap();
    }
}

#[test]
fn missing_mount_points_in_root_are_reported() {
    let fixture = Fixture::new();
    let root = fixture.path("root");
    for dir in ["dev", "sys", "etc", "root", "var/log", "tmp"] {
        fs::create_dir_all(root.join(dir)).unwrap();
    }
    std::os::unix::fs::symlink("../tmp", root.join("run")).unwrap();
    std::os::unix::fs::symlink("/nowhere", root.join("proc")).unwrap();
    for (profile, missing) in
        [(Profile::Host, "proc var/tmp"), (Profile::Forwarding { tap: false }, "proc")]
    {
        let mut spec = fixture.spec(profile, &[&["/bin/x"]]);
        spec.root = RootFilesystem::Rootfs(root.clone());
        let error = fixture.runtime.create(&spec, &[]).unwrap_err().to_string();
        assert!(error.contains("lacks directories to mount on"), "{error}");
        assert!(error.ends_with(&format!("mkdir -p {missing}")), "{error}");
    }
}

/// A command with `once` is known by a number. The report includes its words to identify it.
#[test]
fn failed_once_command_is_reported_with_its_words() {
    let fixture = Fixture::new();
    let mut spec = fixture.spec(
        Profile::Host,
        &[
            &["ip", "addr", "add", "10.0.0.1/24", "dev", "none"],
            &["sh", "-c", "exit 3 # and more than there is room for here"],
        ],
    );
    spec.commands.iter_mut().for_each(|command| command.once = true);
    spec.commands[0].ready =
        Some(CommandProbe { what: Probe::Tcp(1), interval_ms: 10, timeout_ms: 10, within_ms: 10 });
    fixture.run(&spec);
    eventually("both have failed", || {
        (0..2).all(|index| words(&fixture, &spec, index).starts_with("ended"))
    });
    assert_eq!(
        words(&fixture, &spec, 0),
        "ended with code 1: Cannot find device \"none\" (ip addr add 10.0.0.1/24 dev none)"
    );
    assert_eq!(
        words(&fixture, &spec, 1),
        "ended with code 3 (sh -c exit 3 # and more than there is room for h …)"
    );
}
