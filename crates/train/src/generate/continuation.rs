//! Continues a prompt on a mesh, with a cache of keys and values.

use super::{Sampling, Trained};
use crate::devices::{Devices, RankDevice};
use crate::error::RankError;
use crate::peers::Peers;
use crate::processes::{Handshake, Joined};
use crate::stop;
use meshwork_core::hash::hash;
use meshwork_core::{Rank, RunError, World};
use meshwork_engine::{Decoder, TrainError};
use meshwork_models::language;
use meshwork_tensor::ParamSpec;
use meshwork_tensor::param::LocalSlice;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The cost of a continuation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Continued {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Time of their pass.
    pub prompt_time: Duration,
    /// Tokens that were drawn.
    pub drawn: usize,
    /// Time of the passes after the prompt's.
    pub time: Duration,
    /// Bytes of cached keys and values on rank 0.
    pub cache_bytes: usize,
}

/// Draws up to `tokens` tokens after `prompt`, by every rank of the model's mesh: threads of this process, or
/// the processes that a launcher started. `each`
/// is called with each of them, in order. A token that ends a text is not shown and ends this one; so does `asked`, a
/// request to stop.
///
/// A model has a largest number of positions. Where a text gets longer, the model goes on from its last half: its first
/// tokens no longer count.
///
/// # Errors
/// A mesh with dp, whose ranks would have nothing to do; an empty prompt; logits that are no numbers; weights that
/// cannot be read.
pub fn continue_text(
    trained: &Trained,
    prompt: &[u32],
    tokens: usize,
    sampling: Sampling,
    asked: &AtomicBool,
    each: impl FnMut(u32) + Send,
) -> Result<Continued, RunError> {
    let each = Mutex::new(each);
    let shown = |token| each.lock().unwrap_or_else(PoisonError::into_inner)(token);
    Joined::from_config(&trained.config, asked)?.run(&trained.config, &Peers::default(), |world, _, _| {
        continue_text_in(world, trained, prompt, tokens, sampling, asked, shown)
    })
}

/// [`continue_text`] in any world of as many ranks as the mesh has: in each process of a [joined](World::Joined) world
/// it is called with the same arguments, and `each` is called where rank 0 is.
pub fn continue_text_in(
    world: &World,
    trained: &Trained,
    prompt: &[u32],
    tokens: usize,
    sampling: Sampling,
    asked: &AtomicBool,
    each: impl FnMut(u32) + Send,
) -> Result<Continued, RunError> {
    let (config, each) = (&trained.config, Mutex::new(each));
    let devices = world.prepare(|| Devices::open(config))?;
    let input = || format!("{:016x}", hash(format!("{prompt:?} {tokens} {sampling:?}").as_bytes()));
    let handshake = matches!(world, World::Joined(_)).then(|| Handshake::new(config, input()));
    let ended = world.run_with(config.comm.options(), |world| {
        handshake.as_ref().map_or(Ok(Vec::new()), |handshake| handshake.compare(&world))?;
        let plan = config.plan()?;
        let RankDevice { device, world } = devices.rank(world.communicator().clone())?;
        let (model, rank) = (config.model(), Arc::new(Rank::new(&plan.mesh, world)?));
        let capacity = config.model.seq_len;
        let read = |spec: &ParamSpec, slice: &LocalSlice| match stop::is_asked(asked) {
            true => Err(String::from("the program was asked to stop")),
            false => trained.read(spec, slice),
        };
        let decoder = Decoder::new(model, &plan, rank, device, capacity, read);
        stop::require_unasked(asked)?;
        let mut decoder = decoder?;
        let leads = decoder.rank().world_rank() == 0;
        let mut text: Vec<i32> = prompt.iter().map(|&id| id as i32).collect();
        let mut done = Continued { prompt: text.len(), ..Continued::default() };
        let begun = Instant::now();
        let last = text.len() - text.len().min(capacity);
        let mut logits = pass(&mut decoder, &text[last..], config.model.vocab_size)?;
        done.prompt_time = begun.elapsed();
        let begun = Instant::now();
        for place in 0..tokens as u64 {
            if stop::agreed(decoder.rank().world(), asked)? {
                break;
            }
            let token = sampling.pick(&logits, place).ok_or(RankError::Logits { token: text.len() })?;
            if trained.ends_of_text.contains(&(token as u32)) {
                break;
            }
            text.push(token as i32);
            done.drawn += 1;
            if leads && let Ok(mut each) = each.lock() {
                each(token as u32);
            }
            if place + 1 == tokens as u64 {
                break;
            }
            let new = if decoder.past() < capacity {
                1
            } else {
                decoder.clear();
                capacity.div_ceil(2)
            };
            logits = pass(&mut decoder, &text[text.len() - new..], config.model.vocab_size)?;
        }
        done.time = begun.elapsed();
        done.cache_bytes = decoder.cache_bytes();
        Ok::<_, RankError>(done)
    });
    let done = stop::unless_stopped(ended, Vec::new)?;
    Ok(done.into_iter().next().unwrap_or_default())
}

/// The logits after the next tokens of the one text.
fn pass(decoder: &mut Decoder, tokens: &[i32], vocab: usize) -> Result<Vec<f32>, TrainError> {
    let count = tokens.len();
    decoder.next(&language::batch(tokens.to_vec(), vec![-1; count], count)?, count, vocab)
}

/// The text of tokens as they arrive, given out as soon as characters are whole.
#[derive(Debug)]
pub struct TextStream<'a> {
    trained: &'a Trained,
    ids: Vec<u32>,
    /// Bytes of their text that were given out.
    shown: usize,
}

impl<'a> TextStream<'a> {
    /// The text after `prompt`, which is not given out.
    pub fn new(trained: &'a Trained, prompt: &[u32]) -> Self {
        let shown = trained.tokenizer.decode(prompt).len();
        Self { trained, ids: prompt.to_vec(), shown }
    }

    /// The text that `token` adds. The first bytes of a character are kept back until the others arrive.
    pub fn push(&mut self, token: u32) -> String {
        self.ids.push(token);
        let text = self.trained.tokenizer.decode(&self.ids);
        let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        self.take(&text, whole)
    }

    /// The bytes that were kept back.
    pub fn finish(mut self) -> String {
        let text = self.trained.tokenizer.decode(&self.ids);
        self.take(&text, text.len())
    }

    fn take(&mut self, text: &str, end: usize) -> String {
        let new = text.get(self.shown..end).unwrap_or_default().to_owned();
        self.shown = self.shown.max(end);
        super::printable(&new)
    }
}
