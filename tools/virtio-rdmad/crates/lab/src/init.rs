// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The first process of a guest. Its file system is the initramfs, which has this program, the modules of the kernel and
//! what programs need of RDMA.
//!
//! It makes the root of the guest: the initramfs's `/payload`, the file system of the machine below that, and a tmpfs
//! above both. A machine without rdma-core has that of `/rdma-core` below its own files. Then the process loads the driver,
//! waits until the RDMA device has its addresses, and runs the command.

use std::collections::{HashMap, HashSet};
use std::fs::{create_dir_all, read_dir, read_to_string, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{symlink, OFlags};
use rustix::mount::{mount, mount_bind, mount_move, MountFlags};
use rustix::process::{chroot, ioctl_tiocsctty, kill_process_group, setsid, Pid, Signal};
use rustix::stdio::stdin;
use rustix::system::{finit_module, reboot, sethostname, RebootCommand};
use rustix::termios::{tcdrain, tcgetattr, tcsetattr, tcsetwinsize, OptionalActions, Winsize};

use crate::error::Error;
use crate::job::{End, Job, Size, Tell};

/// Where the file system of the machine is, until the root of the guest is made.
const MACHINE: &str = "/machine";
/// What the initramfs adds to it.
const PAYLOAD: &str = "/payload";
/// What a machine without rdma-core needs besides.
const RDMA_CORE: &str = "/rdma-core";
/// Where the libraries of a machine may be.
const LIBRARIES: [&str; 4] =
    ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu", "usr/lib64", "usr/lib"];
/// The library that every program needs that uses RDMA.
const LIBIBVERBS: &str = "libibverbs.so.1";
/// Where the root of the guest is made.
const ROOT: &str = "/root";
/// The directory of the guest, in which its job is.
const OWN: &str = "/run/virtio-rdma-lab";
/// The network interface.
const INTERFACE: &str = "vec0";
/// What the GIDs begin with that a guest has: that of its link-local address, and that of its address of IPv4.
const GIDS: [&str; 2] = ["fe80:", "0000:0000:0000:0000:0000:ffff:"];
/// The modules that the driver and programs need; what these depend on is loaded too.
const MODULES: [&str; 5] = ["ib_core", "ib_uverbs", "rdma_ucm", "ib_umad", "virtio_rdma"];
/// How long the RDMA device may take until it has its addresses.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often the guest looks for them. The kernel tells nobody.
const LOOK: Duration = Duration::from_millis(5);
/// The parameter of the kernel with the directory of the guest on the machine.
const DIRECTORY: &str = "lab.directory=";

/// Returns whether this is the first process of a guest.
pub fn is_guest() -> bool {
    std::process::id() == 1 && Path::new(PAYLOAD).exists()
}

/// Does the job of the guest, and ends the guest.
pub fn main() -> ! {
    let end = match prepare() {
        Ok(job) => run(&job).unwrap_or_else(|error| End::Failed(error.to_string())),
        Err(error) => End::Failed(error.to_string()),
    };
    if let Err(error) = end.write(Path::new(OWN)) {
        eprintln!("virtio-rdma-lab: cannot say how it ended, {end:?}: {error}");
    }
    // If this fails, the end of the first process ends the kernel too.
    let _ = reboot(RebootCommand::PowerOff);
    std::process::exit(0)
}

/// Makes a guest of what the kernel has booted.
fn prepare() -> Result<Job, Error> {
    mounted("proc", "/proc", "proc", "")?;
    let parameters = read_to_string("/proc/cmdline")?;
    let directory = parameters.split_whitespace().find_map(|word| word.strip_prefix(DIRECTORY));
    let directory = directory.ok_or("the kernel was not told of a directory")?;
    mounted("hostfs", OWN, "hostfs", directory)?;
    let job = Job::read(Path::new(OWN))?;
    create_dir_all(MACHINE)?;
    mount("hostfs", MACHINE, "hostfs", MountFlags::RDONLY, c"/")
        .map_err(|error| format!("hostfs on {MACHINE}: {error}"))?;
    mounted("tmpfs", "/above", "tmpfs", "mode=755")?;
    create_dir_all("/above/upper")?;
    create_dir_all("/above/work")?;
    let has_rdma_core =
        LIBRARIES.iter().any(|place| Path::new(MACHINE).join(place).join(LIBIBVERBS).exists());
    let mut below = vec![PAYLOAD, MACHINE];
    if !has_rdma_core {
        below.push(RDMA_CORE);
    }
    let layers = format!("lowerdir={},upperdir=/above/upper,workdir=/above/work", below.join(":"));
    mounted("overlay", ROOT, "overlay", &layers)?;
    for (source, place, kind, options) in [
        ("proc", "proc", "proc", ""),
        ("sysfs", "sys", "sysfs", ""),
        ("devtmpfs", "dev", "devtmpfs", "mode=755"),
        ("devpts", "dev/pts", "devpts", "mode=620,ptmxmode=666"),
        ("tmpfs", "dev/shm", "tmpfs", "mode=1777"),
        ("tmpfs", "run", "tmpfs", "mode=755"),
    ] {
        let place = Path::new(ROOT).join(place);
        mounted(source, &place.display().to_string(), kind, options)?;
    }
    let own = Path::new(ROOT).join(&OWN[1..]);
    create_dir_all(&own)?;
    mount_move(OWN, &own)?;
    if job.is_shared {
        let place = Path::new(ROOT).join(job.directory.strip_prefix("/")?);
        mount_at("hostfs", &place, "hostfs", &job.directory.display().to_string())?;
    }
    std::env::set_current_dir(ROOT)?;
    mount_move(".", "/")?;
    chroot(".")?;
    std::env::set_current_dir("/")?;
    settle(&job)?;
    skip_detection()?;
    let mut modules = Modules::new()?;
    for name in MODULES {
        modules.load(name)?;
    }
    wait_for_link()?;
    for module in &job.modules {
        modules.load_file(&job.directory, module)?;
    }
    Ok(job)
}

/// Mounts a file system on a directory, which is made.
fn mounted(source: &str, place: &str, kind: &str, options: &str) -> Result<(), Error> {
    create_dir_all(place)?;
    mount_at(source, Path::new(place), kind, options)
}

fn mount_at(source: &str, place: &Path, kind: &str, options: &str) -> Result<(), Error> {
    let options = std::ffi::CString::new(options)?;
    mount(source, place, kind, MountFlags::empty(), &*options)
        .map_err(|error| format!("{kind} on {}: {error}", place.display()).into())
}

/// Gives the guest its names, and what programs expect in /dev and /proc.
fn settle(job: &Job) -> Result<(), Error> {
    for (target, link) in [
        ("/proc/self/fd", "/dev/fd"),
        ("/proc/self/fd/0", "/dev/stdin"),
        ("/proc/self/fd/1", "/dev/stdout"),
        ("/proc/self/fd/2", "/dev/stderr"),
    ] {
        symlink(target, link)?;
    }
    let index = usize::from(job.number).saturating_sub(1);
    let (name, _) = job.hosts.get(index).ok_or("the job has no such guest")?;
    sethostname(name.as_bytes())?;
    let own = ["127.0.0.1 localhost".to_owned(), "::1 localhost".to_owned()];
    let guests = job.hosts.iter().map(|(name, address)| format!("{address} {name}"));
    let lines: Vec<_> = own.into_iter().chain(guests).collect();
    replace("/etc/hosts", &(lines.join("\n") + "\n"))?;
    if let Some(rate) = &job.clock {
        add_clock(rate)?;
    }
    Ok(())
}

/// Adds the rate of the processors' clock to /proc/cpuinfo: perftest wants it, and the kernel of the guest has none.
fn add_clock(rate: &str) -> Result<(), Error> {
    const FILE: &str = "/proc/cpuinfo";
    let text = read_to_string(FILE)?;
    let line = |line: &str| match line.split_once(':') {
        Some((key, _)) if key.trim() == "processor" => format!("{line}\ncpu MHz\t\t: {rate}\n"),
        _ => format!("{line}\n"),
    };
    replace(FILE, &text.lines().map(line).collect::<String>())
}

/// Puts a text in the place of a file for the guest alone: the file may be the machine's own, in a directory that is
/// shared.
fn replace(file: &str, text: &str) -> Result<(), Error> {
    let name = Path::new(file).file_name().ok_or("a file has a name")?;
    let own = Path::new("/run").join(name);
    let put = || {
        std::fs::write(&own, text)?;
        if !Path::new(file).exists() {
            std::fs::write(file, "")?;
        }
        Ok(mount_bind(&own, file)?)
    };
    put().map_err(|error: io::Error| format!("{file}: {error}").into())
}

/// Makes the link-local address of the network interface again, without a search for duplicates (RFC 4862): for the first
/// seconds, nobody could reach it, and no two guests have the same.
fn skip_detection() -> Result<(), Error> {
    for (name, value) in [("disable_ipv6", "1"), ("accept_dad", "0"), ("disable_ipv6", "0")] {
        let path = format!("/proc/sys/net/ipv6/conf/{INTERFACE}/{name}");
        std::fs::write(&path, value).map_err(|error| format!("{path}: {error}"))?;
    }
    Ok(())
}

/// The modules of the kernel.
struct Modules {
    directory: PathBuf,
    /// The modules that each one depends on, all by their files: the first one is to be removed first.
    dependencies: HashMap<String, Vec<String>>,
    loaded: HashSet<String>,
}

impl Modules {
    fn new() -> Result<Self, Error> {
        let release = read_to_string("/proc/sys/kernel/osrelease")?;
        let directory = Path::new("/usr/lib/modules").join(release.trim());
        let text = read_to_string(directory.join("modules.dep"))?;
        let words = |needs: &str| needs.split_whitespace().map(str::to_owned).collect();
        let lines = text.lines().filter_map(|line| line.split_once(':'));
        let dependencies = lines.map(|(module, needs)| (module.to_owned(), words(needs))).collect();
        Ok(Self { directory, dependencies, loaded: HashSet::new() })
    }

    /// Loads a module behind those that it depends on.
    fn load(&mut self, name: &str) -> Result<(), Error> {
        let is_it = |file: &&String| {
            let stem = Path::new(file).file_stem().and_then(|stem| stem.to_str());
            stem.is_some_and(|stem| stem.replace('-', "_") == name.replace('-', "_"))
        };
        let module = self.dependencies.keys().find(is_it);
        let module = module.ok_or_else(|| format!("there is no module {name}"))?.clone();
        let needs = self.dependencies.get(&module).into_iter().flatten().rev();
        for module in needs.chain([&module]) {
            if self.loaded.insert(module.clone()) {
                insert(&self.directory.join(module), "")?;
            }
        }
        Ok(())
    }

    /// Loads a module of the user's, with its parameters behind a space, and before it what it depends on.
    fn load_file(&mut self, directory: &Path, line: &str) -> Result<(), Error> {
        let (file, parameters) = line.split_once(' ').unwrap_or((line, ""));
        let path = directory.join(file);
        let module =
            std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        for name in depends(&module).split(',').filter(|name| !name.is_empty()) {
            // What is not the kernel's own is a module of the user's that was loaded before.
            if self.load(name).is_err() && !Path::new("/sys/module").join(name).exists() {
                return Err(format!(
                    "{file} depends on {name}, which is no module of the lab's kernel"
                )
                .into());
            }
        }
        insert(&path, parameters)
    }
}

/// Returns the names of the modules that a module depends on, with commas between them (MODULE_INFO).
fn depends(module: &[u8]) -> &str {
    const KEY: &[u8] = b"\0depends=";
    let at = module.windows(KEY.len()).position(|word| word == KEY);
    let value = at.and_then(|at| module.get(at + KEY.len()..)).unwrap_or_default();
    let value = value.split(|byte| *byte == 0).next().unwrap_or_default();
    std::str::from_utf8(value).unwrap_or_default()
}

fn insert(path: &Path, parameters: &str) -> Result<(), Error> {
    let module = File::open(path).map_err(|error| format!("{}: {error}", path.display()))?;
    match finit_module(&module, &std::ffi::CString::new(parameters)?, 0) {
        Ok(()) | Err(rustix::io::Errno::EXIST) => Ok(()),
        Err(error) => {
            Err(format!("{}: {error}; `--verbose` shows what the kernel says", path.display())
                .into())
        }
    }
}

/// Waits until the port of the RDMA device is active, and has the addresses of the network interface in its GID table.
fn wait_for_link() -> Result<(), Error> {
    let end = Instant::now() + PATIENCE;
    while !has_link().unwrap_or(false) {
        if Instant::now() > end {
            return Err(format!("the RDMA device has no link after {PATIENCE:?}").into());
        }
        std::thread::sleep(LOOK);
    }
    Ok(())
}

fn has_link() -> io::Result<bool> {
    for device in read_dir("/sys/class/infiniband")? {
        let port = device?.path().join("ports/1");
        if !read_to_string(port.join("state"))?.contains("ACTIVE") {
            continue;
        }
        let gids: Vec<_> = read_dir(port.join("gids"))?.filter_map(Result::ok).collect();
        // An entry without a GID cannot be read.
        let gids: Vec<_> = gids.iter().filter_map(|gid| read_to_string(gid.path()).ok()).collect();
        if GIDS.iter().all(|begin| gids.iter().any(|gid| gid.starts_with(begin))) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Opens a serial line.
fn open_line(number: u32) -> Result<File, Error> {
    use std::os::unix::fs::OpenOptionsExt;
    let path = PathBuf::from(format!("/dev/ttyS{number}"));
    let flags = i32::try_from(OFlags::NOCTTY.bits())?;
    Ok(OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?)
}

/// Opens a serial line, as a pipe for bytes of any value.
fn open_pipe(number: u32) -> Result<File, Error> {
    let line = open_line(number)?;
    let mut settings = tcgetattr(&line)?;
    settings.make_raw();
    tcsetattr(&line, OptionalActions::Now, &settings)?;
    Ok(line)
}

/// Runs the command, and returns how it ended.
fn run(job: &Job) -> Result<End, Error> {
    let [errors, signals] = [open_pipe(1)?, open_pipe(2)?];
    let output = if job.terminal.is_some() { open_line(0)? } else { open_pipe(0)? };
    let Some((program, arguments)) = job.command.split_first() else {
        return Ok(wait_for_signal(signals));
    };
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(job.environment.iter().map(|(name, value)| (name, value)))
        .current_dir(&job.directory);
    if let Some(size) = job.terminal {
        give_terminal(&mut command, &output, size)?;
    } else {
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(errors.try_clone()?);
        command.process_group(0);
    }
    if !job.directory.is_dir() {
        let why = "a guest does not have this directory; --share mounts it";
        return Err(format!("{}: {why}", job.directory.display()).into());
    }
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let errors = if job.terminal.is_some() { &output } else { &errors };
            writeln!(&*errors, "virtio-rdma-lab: {program}: {error}")?;
            tcdrain(errors)?;
            return Ok(End::Exited(if error.kind() == io::ErrorKind::NotFound {
                127
            } else {
                126
            }));
        }
    };
    let terminal = job.terminal.map(|_| output.try_clone()).transpose()?;
    take_signals(signals, &child, terminal);
    let status = child.wait()?;
    // The end of a shell hangs its terminal up.
    let output = if job.terminal.is_some() { open_line(0)? } else { output };
    for line in [&output, &errors] {
        tcdrain(line)?;
    }
    Ok(end(status))
}

/// Gives the command a serial line as its terminal.
fn give_terminal(command: &mut Command, line: &File, size: Size) -> Result<(), Error> {
    set_size(line, size)?;
    command.stdin(line.try_clone()?).stdout(line.try_clone()?).stderr(line.try_clone()?);
    let own = || {
        setsid()?;
        Ok(ioctl_tiocsctty(stdin())?)
    };
    // SAFETY: In the child, before exec, the function makes two system calls and allocates nothing. The standard input is
    // open: it is the serial line.
    unsafe { command.pre_exec(own) };
    Ok(())
}

fn set_size(line: &File, Size { rows, columns }: Size) -> io::Result<()> {
    let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
    Ok(tcsetwinsize(line, size)?)
}

/// Waits for a signal that ends the guest, because it has no command.
fn wait_for_signal(mut line: File) -> End {
    let mut bytes = [0; Tell::LEN];
    match line.read_exact(&mut bytes) {
        Ok(()) => End::Exited(0),
        Err(error) => End::Failed(format!("the line of signals: {error}")),
    }
}

/// Gives the command the signals of the machine's user, and its terminal the size that comes with them.
fn take_signals(mut line: File, child: &Child, terminal: Option<File>) {
    let group = Pid::from_child(child);
    std::thread::spawn(move || {
        let mut bytes = [0; Tell::LEN];
        while line.read_exact(&mut bytes).is_ok() {
            let Tell { signal, size } = Tell::from_bytes(bytes);
            match (&terminal, Signal::from_named_raw(signal.into())) {
                // The kernel tells the programs in front.
                (Some(terminal), Some(Signal::WINCH)) => _ = set_size(terminal, size),
                // A command that has ended needs none.
                (_, Some(signal)) => _ = kill_process_group(group, signal),
                (_, None) => {}
            }
        }
    });
}

fn end(status: ExitStatus) -> End {
    let byte = |number: i32| u8::try_from(number).unwrap_or(u8::MAX);
    match (status.code(), status.signal()) {
        (Some(code), _) => End::Exited(byte(code)),
        (None, Some(signal)) => End::Killed(byte(signal)),
        (None, None) => End::Failed(format!("the command ended with {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_says_what_it_depends_on() {
        assert_eq!(
            depends(b"x\0license=GPL\0depends=ib_core,rdma_cm\0name=y\0"),
            "ib_core,rdma_cm"
        );
        assert_eq!(depends(b"license=GPL\0depends=\0"), "");
        assert_eq!(depends(b"\0depends=ib_core"), "ib_core");
        assert_eq!(depends(b"nothing"), "");
    }
}
