//! `pdpd`: see the crate's documentation.

#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use pdp_api::DaemonName;
use pdp_container::{
    LOG_BYTES_MAX, LogFile, ProcessState as GuestState, Runtime, RuntimePaths, safe_removal,
};
use pdp_spec::Descriptors;
use pdpd::access::Authenticator;
use pdpd::api::tls::Tls;
use pdpd::api::{self, Listeners};
use pdpd::engine::DaemonCore;
use pdpd::host::bounds::GuestLimits;
use pdpd::host::claim::{self, claim};
use pdpd::host::control::MuxClient;
use pdpd::host::settings::KernelSettings;
use pdpd::host::upgrade;
use pdpd::images::proxy;
use pdpd::intent::state::StateFile;
use pdpd::kernel::ports::KernelPorts;
use pdpd::machine::Host;
use pdpd::plan::DaemonPaths;
use pdpd::util::error_chain;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// The PdP daemon. Hosts virtual networks in the network namespace that it is started in.
#[derive(Debug, Parser)]
#[command(version)]
struct DaemonArgs {
    /// Name of this daemon, if the machine runs several. The four paths below then
    /// default to pdp-NAME instead of pdp; two daemons never have a path in common.
    #[arg(long)]
    name: Option<DaemonName>,
    /// Directory of sockets and runtime state, lost on reboot [default: /run/pdp].
    #[arg(long)]
    run_dir: Option<PathBuf>,
    /// Directory of persistent state [default: /var/lib/pdp].
    #[arg(long)]
    state_dir: Option<PathBuf>,
    /// Name of the top cgroup [default: pdp].
    #[arg(long)]
    cgroup: Option<String>,
    /// Directory for pins, below a BPF file system [default: /sys/fs/bpf/pdp].
    #[arg(long)]
    bpf_pin_dir: Option<PathBuf>,
    /// Directory of pdp-mux, pdp-tap and the other helpers [default: that of pdpd itself].
    #[arg(long)]
    lib_dir: Option<PathBuf>,
    /// Socket of the API [default: pdpd.sock in the run directory].
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Serve the API also over TLS, at this address and port, for clients with a token.
    #[arg(long, value_name = "ADDRESS:PORT")]
    listen: Option<SocketAddr>,
    /// TLS certificate with its chain, PEM [default: a self-signed one,
    /// created and kept in the state directory as tls.crt].
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "listen"])]
    tls_cert: Option<PathBuf>,
    /// Private key of that certificate, PEM.
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Users with the permissions of root, by name or number.
    #[arg(long, value_name = "USERS", value_delimiter = ',')]
    operator_users: Vec<String>,
    /// Users that may view the whole node, by name or number.
    #[arg(long, value_name = "USERS", value_delimiter = ',')]
    viewer_users: Vec<String>,
    /// Credentials for registries, as written by `docker login` (its
    /// config.json, or auth.json). Used for pulls of operators and of
    /// tenants with `registryAuth`. Only root shall be able to read it.
    #[arg(long, value_name = "FILE")]
    registry_auth: Option<PathBuf>,
    /// CA certificates by registry, in docker's layout: DIRECTORY/HOST:PORT/ca.crt [default:
    /// /etc/containers/certs.d and /etc/docker/certs.d, in addition to the system's].
    #[arg(long, value_name = "DIRECTORY")]
    registry_certs: Option<PathBuf>,
    /// OCI runtime.
    #[arg(long, default_value = "/usr/sbin/runc")]
    runc: PathBuf,
    /// Start even though the state is gone, and end unknown processes of an earlier daemon.
    #[arg(long)]
    forget: bool,
    /// Log only into the run directory; standard error gets only errors that prevent a start.
    #[arg(long)]
    quiet: bool,
    /// Only print the checks of this machine as JSON; `pdp doctor` prints them as a table.
    #[arg(long)]
    doctor: bool,
}

/// Longest wait for processes to end when everything is removed.
const PURGE_WAIT: Duration = Duration::from_secs(10);

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|word| word == proxy::WORD) {
        return proxy::main();
    }
    match run(DaemonArgs::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // All causes in one line. A backtrace would not help the reader.
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: DaemonArgs) -> anyhow::Result<()> {
    // Only root may read the files of pdpd and its helpers. Directories can be
    // traversed by those who know a name. Exceptions set their mode explicitly.
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o066));
    let lib = match &arguments.lib_dir {
        Some(directory) => absolute(directory)?,
        None => std::env::current_exe()?.parent().context("pdpd's own directory")?.into(),
    };
    if arguments.doctor {
        let checks = pdpd::status::doctor::checks(&arguments.runc, &lib);
        serde_json::to_writer(std::io::stdout(), &checks)?;
        return Ok(());
    }
    if !rustix::process::geteuid().is_root() {
        anyhow::bail!("pdpd needs root, for namespaces, cgroups and interfaces; use sudo");
    }
    let base = DaemonName::base(arguments.name.as_ref());
    let place = |given: Option<PathBuf>, above: &str| {
        absolute(&given.unwrap_or_else(|| Path::new(above).join(&base)))
    };
    let run = place(arguments.run_dir, "/run")?;
    let state_directory = place(arguments.state_dir, "/var/lib")?;
    let pins = place(arguments.bpf_pin_dir, pdp_net::xdp::BPF_FS)?;
    let cgroup = arguments.cgroup.unwrap_or_else(|| base.clone());
    let descriptors = allow_descriptors()?;
    // Before anything in them is changed, and as long as the process lives.
    let claims = claim(claim::ClaimPaths {
        run: &run,
        state: &state_directory,
        cgroup: &cgroup,
        pins: &pins,
    })?;
    let log = run.join(upgrade::LOG);
    start_log(&log, arguments.quiet).with_context(|| format!("log {}", log.display()))?;
    upgrade::prepare(&run, &cgroup)?;
    let places = DaemonPaths { run: run.clone(), lib: lib.clone(), pins };
    let runtime = Runtime::new(RuntimePaths {
        runc: arguments.runc,
        shim: lib.join("pdp-shim"),
        init: lib.join("pdp-init"),
        work: lib.join("pdp-work"),
        records: places.records(),
        runc_root: run.join("runc"),
        logs: state_directory.join("logs"),
        images: state_directory.join("images"),
        volumes: state_directory.join("volumes"),
        cgroup,
    })?;
    let state = Arc::new(StateFile::open(&state_directory)?);
    if state.is_new() && !arguments.forget {
        let runs = |directory: &PathBuf| {
            let state = runtime.state(directory);
            matches!(state, Ok(GuestState::Running(_) | GuestState::Created(_)))
        };
        let count = runtime.list()?.iter().filter(|directory| runs(directory)).count();
        anyhow::ensure!(
            count == 0,
            "no state in {}, but guests and helpers of this node run ({count}); restore the state, \
             or start pdpd once with --forget, which ends them, and apply the specs again",
            state_directory.display()
        );
    }
    pdpd::host::leave_sockets_to_cgroups();
    pdpd::host::allow_huge_pages(Path::new(pdpd::host::SHARED_HUGE_PAGES));
    let host = Arc::new(Host {
        mux: MuxClient { path: places.mux_control() },
        ports: KernelPorts::new(&places),
        bounds: GuestLimits::new(&places),
        places,
        runtime,
        state: state.clone(),
        settings: KernelSettings::default(),
    });
    pdpd::machine::spawn_monitor(&host).context("start a thread")?;
    // The variable alone is no proof: it may come from a service to which a parent shell belongs.
    let managed = std::env::var_os("INVOCATION_ID").is_some()
        && rustix::process::getppid() == Some(rustix::process::Pid::INIT);
    let (exit, exiting) = mpsc::unbounded_channel();
    let mut engine =
        DaemonCore::new(host.clone(), host, cpus()?, managed, descriptors, move |purge| {
            // The receiver lives as long as the daemon.
            let _ = exit.send(purge);
        })?;
    let [auth, certs] = [&arguments.registry_auth, &arguments.registry_certs]
        .map(|path| path.as_deref().map(absolute).transpose());
    engine.images.settings.auth = auth?;
    engine.images.settings.certs = certs?;
    let engine = Arc::new(engine);
    let socket = arguments.socket.unwrap_or_else(|| run.join("pdpd.sock"));
    let tls = match arguments.listen {
        Some(address) => {
            let tls = match (&arguments.tls_cert, &arguments.tls_key) {
                (Some(certificate), Some(key)) => Tls::of_files(certificate, key)?,
                _ => Tls::self_signed(&state_directory, address)?,
            };
            let listener = TcpListener::bind(address)
                .with_context(|| format!("can't listen at {address}; see --listen"))?;
            let at = listener.local_addr()?;
            tracing::info!("listening at {at}, certificate SHA-256 {}", tls.sha256);
            Some((listener, tls))
        }
        None => None,
    };
    let unix = api::listen(&socket).with_context(|| format!("API socket {}", socket.display()))?;
    let listeners = Listeners { unix, tls };
    let guard = Arc::new(Authenticator {
        state,
        operators: arguments.operator_users,
        viewers: arguments.viewer_users,
    });
    pdpd::status::publisher::start(&engine)?;
    let keeping = engine.clone();
    std::thread::Builder::new().name("reconciler".into()).spawn(move || {
        // A restart repairs what a panic leaves. No daemon is better
        // than one without a reconcile loop.
        let kept = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            keeping.reconcile_loop.run();
        }));
        if kept.is_err() {
            tracing::error!("the reconciler panicked; the daemon ends, and networks keep running");
            std::process::exit(1);
        }
    })?;
    let ends = engine.clone();
    let purge = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(api::THREADS_MAX)
        .enable_all()
        .build()?
        .block_on(serve(listeners, engine, guard, exiting))?;
    remove(&socket);
    if purge {
        ends.reconcile_loop.stop();
        purge_all(&ends.host, &run, &state_directory, &log);
    }
    drop(claims);
    Ok(())
}

/// Removes everything of the daemon; a failure does not stop the rest. What can't
/// be removed is logged, with the command that removes it. The log is kept then.
fn purge_all(host: &Host, run: &Path, state: &Path, log: &Path) {
    let mut failed = false;
    let mut note = |result: pdp_container::Result<()>| {
        if let Err(error) = result {
            tracing::warn!("{}", error_chain(&error));
            failed = true;
        }
    };
    // First the processes that could not be ended.
    let cgroups = host.runtime.cgroups();
    note(cgroups.remove("", PURGE_WAIT));
    cgroups.remove_if_empty("");
    for place in upgrade::NAMES.map(|name| run.join(name)) {
        note(safe_removal::remove(&place));
    }
    // Only if they contain nothing else.
    for name in ["images", "pulls", "logs", "volumes"] {
        note(safe_removal::remove(&state.join(name)));
    }
    remove(&run.join(claim::RUN_LOCK));
    remove(&state.join(claim::STATE_LOCK));
    remove(&run.join(upgrade::FILE));
    for file in ["pdpd.sqlite", pdpd::intent::state::trail::FILE] {
        for end in ["", "-wal", "-shm"] {
            remove(&state.join(format!("{file}{end}")));
        }
    }
    for path in api::tls::files(state) {
        remove(&path);
    }
    if failed {
        let (run, state) = (run.display(), state.display());
        tracing::warn!("`rm -rf --one-file-system {run} {state}` removes what is left");
    } else {
        remove(log);
        remove(&LogFile::older(log));
    }
    let _ = std::fs::remove_dir(state);
    let _ = std::fs::remove_dir(run);
}

/// Serves until a signal or the API requests the end. Returns true if everything shall be removed.
async fn serve(
    listeners: Listeners,
    engine: Arc<DaemonCore>,
    guard: Arc<Authenticator>,
    mut exiting: mpsc::UnboundedReceiver<bool>,
) -> anyhow::Result<bool> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let purge = Arc::new(Mutex::new(false));
    let (purging, pulling) = (purge.clone(), engine.clone());
    tracing::info!("pdpd {} is ready", env!("CARGO_PKG_VERSION"));
    // The socket listens, so systemd may start dependent units. Nothing
    // is sent if systemd did not start pdpd.
    sd_notify::notify(&[NotifyState::Ready]).context("notify systemd")?;
    api::serve(listeners, engine, guard, async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            Some(all) = exiting.recv() => {
                *purging.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) = all;
            }
        }
        pulling.images.stop();
    })
    .await?;
    let purge = *purge.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(purge)
}

fn absolute(path: &Path) -> anyhow::Result<PathBuf> {
    std::path::absolute(path).with_context(|| format!("path {}", path.display()))
}

/// Logs to the run directory, for `pdp logs`, and also to standard error unless `quiet`.
fn start_log(path: &Path, quiet: bool) -> std::io::Result<()> {
    let file = LogFile::open(path, LOG_BYTES_MAX)?;
    let filter = EnvFilter::try_from_env("PDPD_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let lines = tracing_subscriber::fmt::layer().with_ansi(false);
    tracing_subscriber::registry()
        .with(filter)
        .with((!quiet).then(|| {
            tracing_subscriber::fmt::layer().with_ansi(false).with_writer(std::io::stderr)
        }))
        .with(lines.with_writer(Mutex::new(file)))
        .init();
    Ok(())
}

/// Raises the limit of open files to the hard limit.
fn allow_descriptors() -> anyhow::Result<Descriptors> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .context("limit of open files")?;
    let (limit, kept) = (maximum.unwrap_or(u64::MAX), api::DESCRIPTORS_MAX);
    anyhow::ensure!(
        limit > kept,
        "{limit} open files are too few: pdpd keeps {kept} for its API, and needs one for each \
         interface and each process; raise LimitNOFILE of its service, or `ulimit -Hn`"
    );
    Ok(Descriptors { limit, unchanged_vnets: kept })
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != std::io::ErrorKind::NotFound
    {
        tracing::warn!("can't remove {}: {error}", path.display());
    }
}

/// Returns the CPUs that this process may run on.
fn cpus() -> anyhow::Result<BTreeSet<u32>> {
    let set = rustix::thread::sched_getaffinity(None)?;
    let cpus: BTreeSet<u32> = (0..rustix::thread::CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .map(|cpu| cpu as u32)
        .collect();
    anyhow::ensure!(!cpus.is_empty(), "no CPU to run on");
    Ok(cpus)
}
