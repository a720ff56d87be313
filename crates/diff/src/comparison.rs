//! A comparison of two configurations, with an injected fault on request.

use super::compare::Pair;
use super::fault::Break;
use super::program::Program;
use super::report::Report;
use super::side::{Error, Side};
use super::world::Before;
use super::{SIDES, compare_pair, of_rank_0};
use meshwork_core::{Cause, Group, World};
use meshwork_train::Data;
use meshwork_train::config::{Config, ContextMethod, Fault};
use meshwork_train::processes::Handshake;

/// Where one side has a method of context parallelism, the other computes attention by the same operations.
fn use_one_method(sides: &mut [(Config, Data); 2]) {
    let methods = [0, 1].map(|side| sides[side].0.parallelism.context_parallel_method);
    for (side, (config, _)) in sides.iter_mut().enumerate() {
        if methods[side] == ContextMethod::None && methods[1 - side] != ContextMethod::None {
            config.parallelism.context_parallel_method = ContextMethod::AllGather;
            let notice = "parallelism.context_parallel_method = all_gather, as the other side has a method";
            config.notices.push(notice.to_owned());
        }
    }
}

/// Two sides, ready to be compared.
#[derive(Debug)]
pub struct Comparison {
    sides: [(Config, Data); 2],
    steps: u64,
    fault: Option<Break>,
}

impl Comparison {
    /// Sets up a comparison of `steps` steps of two sides. `fault` names an operation, as `OP` or `OP:backward`, in
    /// which side B is changed by one ulp.
    ///
    /// # Errors
    /// Two sides of different models; an unknown operation, with the known ones.
    pub fn new(mut sides: [(Config, Data); 2], steps: u64, fault: Option<&str>) -> Result<Self, Fault> {
        use_one_method(&mut sides);
        let mut comparison = Self { sides, steps, fault: None };
        let meshes =
            || comparison.sides.iter().filter_map(|(config, _)| config.mesh().ok()).map(|mesh| mesh.to_string());
        let refuse = |error: Error| {
            let valid = match error {
                Error::Structure(_) => "use one model on both sides",
                _ => "use meshes and settings that gpt_train --steps 0 takes",
            };
            Fault::new("--mesh", meshes().collect::<Vec<_>>().join(" "), error.to_string(), valid)
        };
        let programs = comparison.programs().map_err(refuse)?;
        let pair = Pair::new(programs.each_ref()).map_err(refuse)?;
        comparison.fault = fault.map(|asked| Break::find(&pair, asked)).transpose()?;
        Ok(comparison)
    }

    /// Notices for the user that are not faults, with their side.
    pub fn notices(&self) -> Vec<String> {
        let of = |(side, (config, _)): (char, &(Config, Data))| {
            config.notices.iter().map(|notice| format!("{side}: {notice}")).collect::<Vec<_>>()
        };
        SIDES.into_iter().zip(&self.sides).flat_map(of).collect()
    }

    /// The configuration of the side that has more ranks, whose processes or threads are those of the comparison.
    pub fn config(&self) -> &Config {
        let [a, b] = self.sides.each_ref().map(|(config, _)| config);
        if b.parallelism.world_size() > a.parallelism.world_size() { b } else { a }
    }

    /// Runs both sides in threads of this process, and compares them.
    ///
    /// # Errors
    /// A run that fails.
    pub fn run(&self) -> Result<Report, Error> {
        Ok(of_rank_0(self.run_in(&self.config().world())?))
    }

    /// [`run`](Self::run) in the world of [`config`](Self::config), such as that of
    /// [`world_of`](meshwork_train::processes::world_of). The process that has rank 0 gets the report.
    ///
    /// # Errors
    /// As [`run`](Self::run), and processes that have other programs, settings or data.
    pub fn run_in(&self, world: &World) -> Result<Option<Report>, Error> {
        let ([a, mut b], programs) = (self.both()?, self.programs()?);
        b.hook = self.fault.as_ref().map(Break::hook);
        let handshakes = self.sides.each_ref().map(|(config, data)| Handshake::new(config, data.hash()));
        let before = |world: &Group| {
            handshakes.iter().try_for_each(|handshake| handshake.compare(world).map(drop).map_err(Cause::from))
        };
        let before: &Before<'_> = if matches!(world, World::Joined(_)) { &before } else { &|_| Ok(()) };
        compare_pair(world, [&a, &b], &Pair::new(programs.each_ref())?, self.steps, (self.fault.as_ref(), before))
    }

    fn both(&self) -> Result<[Side<'_>; 2], Error> {
        let [(a, a_data), (b, b_data)] = &self.sides;
        Ok([Side::new(a, a_data)?, Side::new(b, b_data)?])
    }

    fn programs(&self) -> Result<[Program; 2], Error> {
        let [a, b] = self.both()?;
        Ok([Program::new(&a)?, Program::new(&b)?])
    }
}
