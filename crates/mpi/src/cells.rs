//! The members of a group by the process that they are in: what lies inside a process, and what goes between.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use meshwork_core::DType;
use meshwork_core::comm::thread::sum_size;
use meshwork_core::tree::nodes;

/// Whole nodes of the tree over the members of a group.
pub(crate) type Nodes = Arc<[Range<usize>]>;

/// Bytes of an element in the sum of a node: of a leaf, the element itself.
pub(crate) fn element_of(node: &Range<usize>, dtype: DType) -> usize {
    if node.len() == 1 { dtype.size() } else { sum_size(dtype) }
}

/// The cells of a group: its members in one process each. All members of the group have the same.
#[derive(Debug)]
pub(crate) struct Cells {
    /// The cell of each member, and the member's place in it.
    places: Vec<(usize, usize)>,
    /// The members of each cell, ascending.
    cells: Vec<Vec<usize>>,
}

impl Cells {
    /// The cells of members that are in these processes.
    pub(crate) fn new(processes: impl IntoIterator<Item = usize>) -> Cells {
        let (mut numbers, mut cells, mut places) = (HashMap::new(), Vec::<Vec<usize>>::new(), Vec::new());
        for (member, process) in processes.into_iter().enumerate() {
            let cell = *numbers.entry(process).or_insert(cells.len());
            if cell == cells.len() {
                cells.push(Vec::new());
            }
            places.push((cell, cells[cell].len()));
            cells[cell].push(member);
        }
        Cells { places, cells }
    }

    /// Their number.
    pub(crate) fn len(&self) -> usize {
        self.cells.len()
    }

    pub(crate) fn members(&self) -> usize {
        self.places.len()
    }

    pub(crate) fn of(&self, member: usize) -> usize {
        self.places[member].0
    }

    /// The members of a cell, ascending.
    pub(crate) fn members_of(&self, cell: usize) -> &[usize] {
        &self.cells[cell]
    }

    /// The member of a cell that sends to `owner` for all of the cell, and receives from it: each has a share.
    pub(crate) fn agent(&self, cell: usize, owner: usize) -> usize {
        let (of_owner, place) = self.places[owner];
        if of_owner == cell { owner } else { self.cells[cell][place % self.cells[cell].len()] }
    }

    /// The agents of the other cells than `owner`'s.
    pub(crate) fn agents(&self, owner: usize) -> impl Iterator<Item = usize> {
        let others = (0..self.len()).filter(move |&cell| cell != self.of(owner));
        others.map(move |cell| self.agent(cell, owner))
    }

    /// The other members of a member's cell.
    pub(crate) fn beside(&self, member: usize) -> impl Iterator<Item = usize> {
        self.members_of(self.of(member)).iter().copied().filter(move |&other| other != member)
    }

    /// The members of some cells, ascending.
    pub(crate) fn members_in(&self, cells: Range<usize>) -> Vec<usize> {
        let mut members = self.cells[cells].concat();
        members.sort_unstable();
        members
    }

    /// The nodes of the tree that have these members, and no others.
    pub(crate) fn nodes(&self, members: &[usize]) -> Nodes {
        nodes(members, self.members()).into()
    }
}

/// The number of cells that exchange with each other in a round of [`Round::of`]; each sends `MEET - 1` messages.
const MEET: usize = 4;

/// A round in which each cell exchanges what it has with others, so that a few rounds bring everything to all: cells
/// first meet neighbours, then ever larger runs of cells that have met meet each other. In which order the sums of runs
/// are added up is the tree's business.
#[derive(Debug)]
pub(crate) struct Round {
    /// What the cell has before the round: that of these cells.
    pub(crate) has: Range<usize>,
    /// The cells to which it sends.
    pub(crate) sends: Vec<usize>,
    /// The cells from which it receives, and what they have.
    pub(crate) receives: Vec<(usize, Range<usize>)>,
}

impl Round {
    /// The rounds of one of `cells` cells.
    pub(crate) fn of(cell: usize, cells: usize) -> Vec<Round> {
        let mut rounds = Vec::new();
        let mut width = 1;
        while width < cells {
            let first = cell / (width * MEET) * (width * MEET);
            let run = |at: usize| at..(at + width).min(cells);
            let has = run(cell / width * width);
            let mut round = Round { has: has.clone(), sends: Vec::new(), receives: Vec::new() };
            // Begins with the next one, so that not all send to the first one first.
            let others = (1..MEET).map(|step| first + (has.start - first + step * width) % (width * MEET));
            for other in others.filter(|&other| other < cells).map(run) {
                // The last run may be shorter: some of its cells then send to several.
                let at = cell - has.start;
                round.receives.push((other.start + at % other.len(), other.clone()));
                round.sends.extend(other.clone().skip(at).step_by(has.len()));
            }
            rounds.push(round);
            width *= MEET;
        }
        rounds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_bring_everything_to_all_cells_in_few_messages() {
        for cells in 1..200 {
            let of_cells: Vec<Vec<Round>> = (0..cells).map(|cell| Round::of(cell, cells)).collect();
            let mut has: Vec<Range<usize>> = (0..cells).map(|cell| cell..cell + 1).collect();
            for number in 0..of_cells[0].len() {
                let rounds: Vec<&Round> = of_cells.iter().map(|rounds| &rounds[number]).collect();
                let before = has.clone();
                for (cell, has) in has.iter_mut().enumerate() {
                    let round = rounds[cell];
                    assert_eq!(round.has, before[cell]);
                    let mut runs = vec![round.has.clone()];
                    for (from, theirs) in &round.receives {
                        assert_eq!(before[*from], *theirs);
                        assert!(rounds[*from].sends.contains(&cell), "{from} to {cell} of {cells}");
                        runs.push(theirs.clone());
                    }
                    let sent = &round.sends;
                    assert!(sent.iter().all(|to| rounds[*to].receives.iter().any(|(from, _)| *from == cell)));
                    runs.sort_by_key(|run| run.start);
                    assert!(runs.windows(2).all(|two| two[0].end == two[1].start), "{runs:?}");
                    *has = runs[0].start..runs[runs.len() - 1].end;
                }
            }
            assert!(has.iter().all(|has| *has == (0..cells)), "{cells}");
        }
        let most = |cells: usize| {
            let sent = |cell| Round::of(cell, cells).iter().map(|round| round.sends.len()).sum::<usize>();
            (0..cells).map(sent).max()
        };
        assert_eq!([2, 4, 16, 256, 4096].map(most), [1, 3, 6, 12, 18].map(Some));
    }
}
