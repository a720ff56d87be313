//! The program under way.

use std::io;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// How often it is looked at.
const LOOK: Duration = Duration::from_millis(20);

/// Waits for the end of the program; a request to stop is passed on once.
pub fn wait(child: &mut Child, stop: &AtomicBool) -> io::Result<ExitStatus> {
    let mut told = false;
    loop {
        if let Some(ended) = child.try_wait()? {
            return Ok(ended);
        }
        if stop.load(Ordering::Relaxed) && !std::mem::replace(&mut told, true) {
            signal(child, "TERM");
        }
        thread::sleep(LOOK);
    }
}

/// Sends a signal to all processes of the program's group; there may be none left.
pub fn signal(child: &Child, name: &str) {
    _ = Command::new("kill").args(["-s", name, "--", &format!("-{}", child.id())]).stderr(Stdio::null()).status();
}

/// The end in words.
pub fn in_words(ended: ExitStatus) -> String {
    match (ended.code(), ended.signal()) {
        (Some(code), _) => format!("the program ended with code {code}"),
        (_, Some(signal)) => format!("the program was ended by signal {signal}"),
        _ => "the program ended".to_owned(),
    }
}

/// The number of ranks that there is room for, as a command for sh prints it.
pub fn room(ask: &str) -> Result<usize, String> {
    let told = Command::new("sh").args(["-c", ask]).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let told = told.map_err(|error| format!("sh cannot be started: {error}"))?;
    let text = String::from_utf8_lossy(&told.stdout);
    let ranks = text.trim().parse().ok().filter(|ranks| *ranks > 0 && told.status.success());
    ranks.ok_or_else(|| format!("{ask} printed {:?}, no number of ranks above 0", text.trim()))
}
