//! The progress of a run on standard output: a bar on a terminal that can draw one, plain lines elsewhere.
//!
//! Plain lines come for each of the first 10 steps, then for every 10th, and for the last.

use crate::metrics::{Rewards, Step};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread::{self, JoinHandle};

/// Shows the steps of a run on standard output, from a thread of its own: a reader that pauses (a pager, Ctrl-S) must
/// not hold up the rank that reports.
#[derive(Debug)]
pub struct Progress {
    events: Option<Sender<Event>>,
    screen: Option<JoinHandle<()>>,
    unread: Arc<AtomicBool>,
}

#[derive(Debug)]
enum Event {
    Step(Box<Step>),
    Validation { step: u64, loss: f64, uncompressed: Option<f64> },
    Note(Note),
}

/// A line about a run, beside its steps.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A checkpoint is complete.
    Saved {
        /// Its step.
        step: u64,
        /// The line about it.
        text: String,
    },
    /// Anything else.
    Text(String),
}

impl From<String> for Note {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl Progress {
    /// Progress of a run of `steps` steps.
    pub fn new(steps: u64) -> Self {
        let target = ProgressDrawTarget::stdout();
        // Hidden where output is no terminal, and on one that cannot move its cursor: `TERM=dumb`, or none.
        let bar = (!target.is_hidden()).then(|| bar(steps, target));
        Self::on(Screen::new(steps, bar))
    }

    fn on(mut screen: Screen) -> Self {
        let (sender, events) = mpsc::channel();
        let unread = Arc::new(AtomicBool::new(false));
        let tell = unread.clone();
        let show = move || {
            // Shown from the start, because the first step may take long.
            _ = screen.bar.as_ref().map(ProgressBar::tick);
            let left = events.iter().find_map(|event| screen.show(&event).err());
            tell.store(left.is_some_and(|error| error.kind() == ErrorKind::BrokenPipe), Ordering::Relaxed);
        };
        // Without the thread nothing is shown, but training continues.
        let screen = thread::Builder::new().name("progress".to_owned()).spawn(show).ok();
        Self { events: Some(sender), screen, unread }
    }

    /// Shows a step that was trained.
    pub fn step(&self, step: &Step) {
        self.send(Event::Step(Box::new(step.clone())));
    }

    /// Shows a validation after `step`.
    pub fn validation(&self, step: u64, loss: f64, uncompressed: Option<f64>) {
        self.send(Event::Validation { step, loss, uncompressed });
    }

    /// Shows a line of text.
    pub fn note(&self, note: Note) {
        self.send(Event::Note(note));
    }

    /// Whether the reader of standard output has closed it, as `| head` does.
    pub fn is_unread(&self) -> bool {
        self.unread.load(Ordering::Relaxed)
    }

    fn send(&self, event: Event) {
        if let Some(events) = &self.events {
            _ = events.send(event); // fails once the screen could not be written
        }
    }
}

impl Drop for Progress {
    /// Waits until everything is shown.
    fn drop(&mut self) {
        self.events = None;
        if let Some(screen) = self.screen.take() {
            _ = screen.join();
        }
    }
}

/// Standard output, with a bar if it is a terminal.
struct Screen {
    steps: u64,
    bar: Option<ProgressBar>,
    /// The messages of the bar, empty until there is one: about the last step, the last validation and the last
    /// checkpoint.
    loss: String,
    validation: String,
    saved: String,
}

impl Screen {
    fn new(steps: u64, bar: Option<ProgressBar>) -> Self {
        Self { steps, bar, loss: String::new(), validation: String::new(), saved: String::new() }
    }

    fn show(&mut self, event: &Event) -> io::Result<()> {
        let shown = match event {
            Event::Step(step) => {
                if !step.masked {
                    self.loss = format!("loss {:.4}  {:.0} tokens/s", step.loss, step.tokens_per_s);
                }
                self.bar.iter().for_each(|bar| bar.set_position(step.step));
                match self.bar.is_none() && (step.skipped || shown(step.step, self.steps)) {
                    true => print(&line(step, self.steps)),
                    false => Ok(()),
                }
            }
            Event::Validation { step, loss, uncompressed } => {
                self.validation = format!("validation {loss:.4}");
                let exact = uncompressed.map_or_else(String::new, |loss| format!(", uncompressed {loss:.4}"));
                self.print(&format!("step {step}/{}  validation loss {loss:.4}{exact}", self.steps))
            }
            Event::Note(Note::Saved { step, text }) => {
                self.saved = format!("saved {step}");
                self.print(text)
            }
            Event::Note(Note::Text(text)) => self.print(text),
        };
        if let Some(bar) = &self.bar {
            let said = [&self.loss, &self.validation, &self.saved].map(String::as_str);
            bar.set_message(said.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("  "));
        }
        shown
    }

    /// A line above the bar.
    fn print(&self, text: &str) -> io::Result<()> {
        match &self.bar {
            // `ProgressBar::println` would drop the line where the bar is hidden.
            Some(bar) => bar.suspend(|| print(text)),
            None => print(text),
        }
    }
}

impl Drop for Screen {
    /// Leaves the bar on the screen, so that the next output, such as an error, is printed below it.
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
            // The bar leaves the cursor at its end, and only some terminals wrap from there.
            _ = print("");
        }
    }
}

fn print(text: &str) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{text}")
}

fn bar(steps: u64, target: ProgressDrawTarget) -> ProgressBar {
    let style = ProgressStyle::with_template("{pos}/{len} {wide_bar} {msg}  ETA {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::with_draw_target(Some(steps), target).with_style(style)
}

fn shown(step: u64, steps: u64) -> bool {
    step <= 10 || step.is_multiple_of(10) || step == steps
}

fn line(step: &Step, steps: u64) -> String {
    let Step { step, loss, grad_norm, lr, tokens_per_s, loss_scale, skipped, masked, dpo, .. } = step;
    if *masked {
        return format!("step {step}/{steps}  skipped: every target of its batch is masked");
    }
    let rewards = dpo.map_or_else(String::new, |Rewards { margin, accuracy, .. }| {
        format!("  margin {margin:.3}  accuracy {accuracy:.2}")
    });
    let of_step = format!("step {step}/{steps}  loss {loss:.4}{rewards}");
    match skipped {
        true => format!("{of_step}  skipped: a gradient overflowed at loss scale {}", loss_scale.unwrap_or(1.0)),
        false => format!("{of_step}  grad_norm {grad_norm:.2}  lr {lr:.1e}  {tokens_per_s:.0} tokens/s"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use indicatif::TermLike;

    use super::*;

    const STEP: Step = Step {
        step: 10,
        loss: 3.12344,
        grad_norm: 0.834,
        lr: 3e-4,
        step_ms: 49.7,
        tokens_per_s: 41233.7,
        comm_bytes: vec![],
        loss_scale: None,
        skipped: false,
        masked: false,
        moe: None,
        dpo: None,
        offload: None,
        peak_bytes: vec![],
        compute_ms: vec![],
        wait_ms: vec![],
    };

    #[test]
    fn early_steps_tenth_steps_and_the_last_are_shown() {
        let steps: Vec<u64> = (1..=33).filter(|&step| shown(step, 33)).collect();
        assert_eq!(steps, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 33]);
    }

    #[test]
    fn a_plain_line() {
        assert_eq!(line(&STEP, 300), "step 10/300  loss 3.1234  grad_norm 0.83  lr 3.0e-4  41234 tokens/s");
        let rewards = Rewards { chosen: 0.5, rejected: -0.25, margin: 0.75, accuracy: 0.875 };
        let text = "step 10/300  loss 3.1234  margin 0.750  accuracy 0.88  grad_norm 0.83  lr 3.0e-4  41234 tokens/s";
        assert_eq!(line(&Step { dpo: Some(rewards), ..STEP }, 300), text);
        let skipped = Step { loss_scale: Some(65536.0), skipped: true, ..STEP };
        let text = "step 10/300  loss 3.1234  skipped: a gradient overflowed at loss scale 65536";
        assert_eq!(line(&skipped, 300), text);
        let masked = Step { loss: f64::NAN, skipped: true, masked: true, ..STEP };
        assert_eq!(line(&masked, 300), "step 10/300  skipped: every target of its batch is masked");
    }

    /// A terminal that records everything written to it.
    #[derive(Debug, Clone, Default)]
    struct Terminal(Arc<Mutex<String>>);

    impl TermLike for Terminal {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> io::Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            self.0.lock().unwrap().push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn the_bar_shows_step_loss_speed_and_time_left() {
        let terminal = Terminal::default();
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        let progress = Progress::on(Screen::new(300, Some(bar(300, target))));
        progress.step(&STEP);
        drop(progress);
        let written = terminal.0.lock().unwrap();
        assert!(written.contains("10/300 "), "{written}");
        assert!(written.contains(" loss 3.1234  41234 tokens/s  ETA "), "{written}");
        assert!(written.contains('█') || written.contains('░'), "{written}");
    }

    #[test]
    fn the_bar_keeps_the_last_validation_and_the_last_checkpoint() {
        let terminal = Terminal::default();
        let target = ProgressDrawTarget::term_like(Box::new(terminal.clone()));
        let mut screen = Screen::new(300, Some(bar(300, target)));
        let saved = |step| Event::Note(Note::Saved { step, text: format!("step {step}  saved in a folder") });
        for event in [
            Event::Validation { step: 8, loss: 3.25, uncompressed: None },
            saved(8),
            saved(9),
            Event::Step(Box::new(STEP.clone())),
        ] {
            screen.show(&event).unwrap();
        }
        drop(screen);
        let written = terminal.0.lock().unwrap();
        assert!(written.contains(" loss 3.1234  41234 tokens/s  validation 3.2500  saved 9  ETA "), "{written}");
    }
}
