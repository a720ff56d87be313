//! Optimizer states of the elements of flat buffers, in pages. Without offload a flat buffer is one page, in memory.
//! With offload an update visits the pages in an order that is known before: while one is updated, the next is read and
//! the one before is written back. So at most three are in memory, and none between steps.

use super::disk::{Disk, Reading, Writing};
use super::space::Region;
use crate::prelude::*;

/// The most elements of a page, unless a rule needs more at once: 4 MiB of each state in f32, which any disk moves at
/// its full speed.
const PAGE: usize = 1 << 20;

/// A page is at most this part of a rank's states too, so that three of them are few.
const PAGES: usize = 32;

/// Elements of a flat buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    /// The flat buffer.
    pub flat: usize,
    /// The elements, counted in the window of it that the rank keeps.
    pub range: Range<usize>,
}

/// A flat buffer to be cut into pages.
#[derive(Clone, Debug)]
pub struct Flat {
    /// The types of its states.
    pub states: Vec<DType>,
    /// Elements in the rank's window.
    pub elements: usize,
    /// Ranges that may not be cut, in order.
    pub whole: Vec<Range<usize>>,
}

/// The states of the elements of all flat buffers of a rank.
#[derive(Debug)]
pub struct Elements {
    flats: Rc<[Flat]>,
    pages: Rc<[Page]>,
    /// Per flat buffer its pages.
    of_flat: Rc<[Range<usize>]>,
    held: Held,
    device: Arc<dyn Device>,
}

#[derive(Debug)]
enum Held {
    /// Per page.
    Memory(Vec<Vec<Buffer>>),
    Disk(Pager),
}

/// Pages on a disk.
#[derive(Debug)]
struct Pager {
    disk: Rc<Disk>,
    /// Per page. A region that another version of the states has too is not written: the page moves to a new one.
    regions: Vec<Rc<Region>>,
    /// The pages in the order in which an update needs them.
    visits: Rc<[usize]>,
    /// Visits of this update so far.
    visited: usize,
    current: Option<(usize, Vec<Buffer>)>,
    ahead: Option<(usize, Vec<Reading>)>,
    behind: Vec<Writing>,
}

/// Cuts flat buffers into pages of about `most` elements.
fn cut(flats: &[Flat], most: usize) -> (Vec<Page>, Vec<Range<usize>>) {
    let (mut pages, mut of_flat) = (Vec::new(), Vec::with_capacity(flats.len()));
    for (flat, Flat { elements, whole, .. }) in flats.iter().enumerate() {
        let (first, mut start) = (pages.len(), 0);
        while start < *elements {
            let wanted = start.saturating_add(most).min(*elements);
            // A range that may not be cut begins or ends a page, or is one.
            let end = match whole.iter().find(|whole| whole.start < wanted && wanted < whole.end) {
                Some(whole) if whole.start > start => whole.start,
                Some(whole) => whole.end,
                None => wanted,
            };
            pages.push(Page { flat, range: start..end });
            start = end;
        }
        of_flat.push(first..pages.len());
    }
    (pages, of_flat)
}

impl Elements {
    /// States of flat buffers, all zero, in memory or on a disk.
    pub fn new(flats: Vec<Flat>, disk: Option<&Rc<Disk>>, device: &Arc<dyn Device>) -> Result<Self> {
        let with_states = flats.iter().filter(|flat| !flat.states.is_empty());
        let all: usize = with_states.map(|flat| flat.elements).sum();
        let most = disk.map_or(usize::MAX, |_| all.div_ceil(PAGES).clamp(1, PAGE));
        let (pages, of_flat) = cut(&flats, most);
        let _optimizer = device.meter().enter(Category::Optimizer);
        let held = match disk {
            None => {
                let zeros = |page: &Page| {
                    let states = flats[page.flat].states.iter();
                    states.map(|&dtype| device.zeros(dtype, page.range.len())).collect::<Result<Vec<_>, Error>>()
                };
                Held::Memory(pages.iter().map(zeros).collect::<Result<_, Error>>()?)
            }
            Some(disk) => {
                let regions = pages.iter().map(|page| disk.region(page.bytes(&flats))).collect();
                let visits = Rc::new([]);
                let (current, ahead, behind) = Default::default();
                Held::Disk(Pager { disk: disk.clone(), regions, visits, visited: 0, current, ahead, behind })
            }
        };
        Ok(Self { flats: flats.into(), pages: pages.into(), of_flat: of_flat.into(), held, device: device.clone() })
    }

    /// Says in which order an update needs pages.
    pub fn set_order(&mut self, visits: impl IntoIterator<Item = usize>) {
        if let Held::Disk(pager) = &mut self.held {
            let mut visits: Vec<usize> = visits.into_iter().collect();
            visits.dedup();
            pager.visits = visits.into();
        }
    }

    /// The number of states of a flat buffer.
    pub fn states(&self, flat: usize) -> usize {
        self.flats.get(flat).map_or(0, |flat| flat.states.len())
    }

    /// The pages that have elements of a range of a flat buffer.
    pub fn cover(&self, flat: usize, range: &Range<usize>) -> Range<usize> {
        let Some(pages) = self.of_flat.get(flat).filter(|_| !range.is_empty()) else { return 0..0 };
        let of_flat = &self.pages[pages.clone()];
        let first = of_flat.partition_point(|page| page.range.end <= range.start);
        let end = of_flat.partition_point(|page| page.range.start < range.end);
        pages.start + first..pages.start + end
    }

    /// The elements of a page.
    pub fn page(&self, number: usize) -> &Page {
        &self.pages[number]
    }

    /// The states of a page, for reading and writing.
    pub fn get(&mut self, number: usize) -> Result<&mut [Buffer]> {
        match &mut self.held {
            Held::Memory(pages) => Ok(&mut pages[number]),
            Held::Disk(pager) => {
                let _optimizer = self.device.meter().enter(Category::Optimizer);
                pager.get(number, &self.pages, &self.flats)
            }
        }
    }

    /// Whether the states of all pages are there at once.
    pub fn are_in_memory(&self) -> bool {
        matches!(self.held, Held::Memory(_))
    }

    /// Gives `work` the states of these pages, each once, in their order: all at once from memory, one page after the
    /// other from a disk. In memory a flat buffer is one page.
    pub fn visit(
        &mut self,
        numbers: &[usize],
        mut work: impl FnMut(Vec<(&Page, &mut [Buffer])>) -> Result<()>,
    ) -> Result<()> {
        let pages = &self.pages;
        match &mut self.held {
            Held::Memory(states) => {
                let mut all: Vec<_> = pages.iter().zip(states).map(Some).collect();
                let mut page = |&number: &usize| all[number].take().map(|(page, states)| (page, &mut states[..]));
                work(numbers.iter().filter_map(&mut page).collect())
            }
            Held::Disk(pager) => numbers.iter().try_for_each(|&number| {
                let optimizer = self.device.meter().enter(Category::Optimizer);
                let states = pager.get(number, pages, &self.flats)?;
                drop(optimizer);
                work(vec![(&pages[number], states)])
            }),
        }
    }

    /// Ends an update: all changes are written.
    pub fn finish(&mut self) -> Result<()> {
        match &mut self.held {
            Held::Memory(_) => Ok(()),
            Held::Disk(pager) => pager.finish(),
        }
    }

    /// Another version with the same values, to be changed by itself.
    pub fn copy(&self) -> Result<Self> {
        let _optimizer = self.device.meter().enter(Category::Optimizer);
        let held = match &self.held {
            Held::Memory(pages) => {
                let layout = self.device.layout()?;
                let of = |states: &Vec<Buffer>| states.iter().map(|state| layout.copy(state)).collect();
                Held::Memory(pages.iter().map(of).collect::<Result<_, Error>>()?)
            }
            Held::Disk(pager) => Held::Disk(pager.copy()),
        };
        let (flats, pages, of_flat) = (self.flats.clone(), self.pages.clone(), self.of_flat.clone());
        Ok(Self { flats, pages, of_flat, held, device: self.device.clone() })
    }

    /// A range of a state of a flat buffer, in host memory: without a copy where one page in memory has it.
    pub fn read(&self, flat: usize, state: usize, range: Range<usize>) -> Result<Buffer> {
        let dtype = self.flats[flat].states[state];
        let mut parts = Vec::new();
        for number in self.cover(flat, &range) {
            let page = &self.pages[number];
            let here =
                range.start.max(page.range.start) - page.range.start..range.end.min(page.range.end) - page.range.start;
            parts.push(match &self.held {
                Held::Memory(pages) => self.device.download(&pages[number][state].slice(here)?)?,
                Held::Disk(pager) => {
                    let from = page.offset(&self.flats, state) + here.start * dtype.size();
                    pager.disk.read_now(&pager.regions[number], from as u64, dtype, here.len())?
                }
            });
        }
        match (parts.len(), parts.pop()) {
            (_, None) => Ok(Buffer::zeros(dtype, 0)),
            (1, Some(part)) => Ok(part),
            (_, Some(last)) => {
                let (mut all, mut at) = (Buffer::zeros(dtype, range.len()), 0);
                let bytes = all.as_bytes_mut()?;
                for part in parts.iter().chain([&last]) {
                    bytes[at..at + part.bytes()].copy_from_slice(part.as_bytes()?);
                    at += part.bytes();
                }
                Ok(all)
            }
        }
    }

    /// Replaces elements of a state of a flat buffer from `at` on by `values`, in host memory.
    pub fn write(&mut self, flat: usize, state: usize, at: usize, values: &Buffer) -> Result<()> {
        let (range, size) = (at..at + values.count(), values.dtype().size());
        for number in self.cover(flat, &range) {
            let page = &self.pages[number];
            let (start, end) = (range.start.max(page.range.start), range.end.min(page.range.end));
            let part = values.slice(start - at..end - at)?;
            let into = start - page.range.start;
            match &mut self.held {
                Held::Memory(pages) => self.device.upload_into(&part, &mut pages[number][state], into)?,
                Held::Disk(pager) => {
                    let from = page.offset(&self.flats, state) + into * size;
                    pager.disk.write_now(&pager.regions[number], from as u64, part)?;
                }
            }
        }
        Ok(())
    }
}

impl Page {
    fn bytes(&self, flats: &[Flat]) -> usize {
        self.offset(flats, flats[self.flat].states.len())
    }

    /// Where a state begins in the page's region, in bytes.
    fn offset(&self, flats: &[Flat], state: usize) -> usize {
        let before = &flats[self.flat].states[..state];
        before.iter().map(|dtype| self.range.len() * dtype.size()).sum()
    }
}

impl Pager {
    fn get(&mut self, number: usize, pages: &[Page], flats: &[Flat]) -> Result<&mut [Buffer]> {
        if self.current.as_ref().is_none_or(|(current, _)| *current != number) {
            let written = std::mem::take(&mut self.behind);
            self.put_back()?;
            for writing in written {
                writing.wait()?;
            }
            let reading = match self.ahead.take() {
                Some((ahead, reading)) if ahead == number => reading,
                _ => self.read(number, pages, flats)?,
            };
            self.visited += 1;
            let next = self.visits.get(self.visited).copied();
            let buffers = reading.into_iter().map(Reading::wait).collect::<Result<_>>()?;
            if let Some(next) = next {
                self.ahead = Some((next, self.read(next, pages, flats)?));
            }
            self.current = Some((number, buffers));
        }
        Ok(self.current.as_mut().map_or(&mut [], |(_, buffers)| buffers))
    }

    fn read(&self, number: usize, pages: &[Page], flats: &[Flat]) -> Result<Vec<Reading>> {
        let page = &pages[number];
        let (region, states) = (&self.regions[number], flats[page.flat].states.iter().enumerate());
        let read = |(state, &dtype): (usize, &DType)| {
            self.disk.read(region, page.offset(flats, state) as u64, dtype, page.range.len())
        };
        states.map(read).collect()
    }

    /// Begins to write back the page that was visited last.
    fn put_back(&mut self) -> Result<()> {
        let Some((number, buffers)) = self.current.take() else { return Ok(()) };
        if Rc::get_mut(&mut self.regions[number]).is_none() {
            let bytes = buffers.iter().map(Buffer::bytes).sum();
            self.regions[number] = self.disk.region(bytes);
        }
        let mut from = 0;
        for buffer in buffers {
            let bytes = buffer.bytes() as u64;
            self.behind.push(self.disk.write(&self.regions[number], from, buffer)?);
            from += bytes;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<()> {
        self.put_back()?;
        self.ahead = None;
        self.visited = 0;
        std::mem::take(&mut self.behind).into_iter().try_for_each(|writing| writing.wait().map(drop))
    }

    fn copy(&self) -> Self {
        let (disk, regions, visits) = (self.disk.clone(), self.regions.clone(), self.visits.clone());
        let (current, ahead, behind) = Default::default();
        Self { disk, regions, visits, visited: 0, current, ahead, behind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(elements: usize, whole: &[Range<usize>]) -> Flat {
        Flat { states: vec![DType::F32], elements, whole: whole.to_vec() }
    }

    #[test]
    fn pages_cut_nothing_that_must_stay_whole() {
        let cut = |flats: &[Flat], most| {
            let (pages, of_flat) = cut(flats, most);
            let ranges: Vec<Range<usize>> = pages.into_iter().map(|page| page.range).collect();
            (ranges, of_flat)
        };
        assert_eq!(cut(&[flat(10, &[]), flat(3, &[])], 4), (vec![0..4, 4..8, 8..10, 0..3], vec![0..3, 3..4]));
        assert_eq!(cut(&[flat(10, &[]), flat(2, &[])], usize::MAX), (vec![0..10, 0..2], vec![0..1, 1..2]));
        let whole = [0..3, 3..5, 5..9];
        assert_eq!(cut(&[flat(12, &whole)], 4).0, [0..3, 3..5, 5..9, 9..12]);
        assert_eq!(cut(&[flat(12, &whole)], 6).0, [0..5, 5..11, 11..12]);
        assert_eq!(cut(&[flat(12, &whole)], 1).0, [0..3, 3..5, 5..9, 9..10, 10..11, 11..12]);
        assert_eq!(cut(&[flat(0, &[]), flat(0, &[])], 4), (vec![], vec![0..0, 0..0]));
    }
}
