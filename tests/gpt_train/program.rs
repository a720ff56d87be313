//! Runs the program, and reads its output.

use crate::example;
use serde_json::Value;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A model that trains in an instant.
pub const SMALL: &str = "--set model.hidden_size=16 --set model.num_layers=2 --set model.seq_len=16 \
                         --set training.global_batch_size=8";

/// The same with half of the tokens, for emulated devices, whose kernels run thread by thread.
pub const SMALLER: &str = "--set model.hidden_size=16 --set model.num_layers=2 --set model.seq_len=8 \
                           --set training.global_batch_size=8";

/// Most of such a run would be its sample.
pub const UNSAMPLED: &str = "--set metrics.sample_tokens=0";

/// Longer than anything here takes on a busy machine; a run that reaches it hangs.
const DEADLINE: Duration = Duration::from_secs(180);

/// The program.
pub fn path() -> PathBuf {
    example::program("gpt_train")
}

/// A command line of words without spaces.
pub fn command(line: &str) -> Command {
    let mut command = Command::new(path());
    command.args(line.split_whitespace()).stdin(Stdio::null());
    command
}

/// How a run ended.
#[derive(Debug)]
pub struct Ended {
    /// The exit code; `None` if a signal killed it.
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Runs the program to its end.
pub fn run(line: &str) -> Ended {
    Running::start(command(line)).end()
}

/// Runs the program to its end, which must be a success without output on standard error.
pub fn succeed(line: &str) -> String {
    let ended = run(line);
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{line}\n{}", ended.out);
    ended.out
}

/// A text without the breaks of its lines: one space between its words.
pub fn unwrapped(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A program under way, killed when dropped.
pub struct Running {
    pub child: Child,
    out: Option<JoinHandle<String>>,
    err: Option<JoinHandle<String>>,
}

impl Running {
    /// Starts it, and reads all output.
    pub fn start(mut command: Command) -> Self {
        let mut running = Self::start_unread(&mut command);
        running.out = running.child.stdout.take().map(read);
        running
    }

    /// Starts it, and leaves standard output to the caller.
    pub fn start_unread(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let err = child.stderr.take().map(read);
        Self { child, out: None, err }
    }

    /// Waits for the end.
    pub fn end(mut self) -> Ended {
        let code = wait_for("the program to end", || self.child.try_wait().unwrap()).code();
        let text =
            |reader: Option<JoinHandle<String>>| reader.map_or_else(String::new, |reader| reader.join().unwrap());
        Ended { code, out: text(self.out.take()), err: text(self.err.take()) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn read(mut pipe: impl Read + Send + 'static) -> JoinHandle<String> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        _ = pipe.read_to_end(&mut bytes);
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Calls `ask` until it returns an answer.
pub fn wait_for<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(started.elapsed() < DEADLINE, "waited in vain for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// An empty folder of that name, in a path without spaces unless cargo's has one.
pub fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpt_train").join(name);
    _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// The lines of a metrics file, whole ones only.
pub fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    whole.map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}"))).collect()
}

/// Runs the program for its metrics.
pub fn metrics(folder: &Path, line: &str) -> Vec<Value> {
    let path = folder.join("metrics.jsonl");
    succeed(&format!("{line} --metrics {}", path.display()));
    lines(&path)
}

/// The events of one kind.
pub fn events<'a>(lines: &'a [Value], kind: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["event"] == kind).collect()
}

/// A number of each event of one kind.
pub fn numbers(lines: &[Value], kind: &str, key: &str) -> Vec<f64> {
    events(lines, kind).into_iter().map(|event| event[key].as_f64().unwrap()).collect()
}
