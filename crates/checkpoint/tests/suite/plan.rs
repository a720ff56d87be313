//! Who writes which slices: every element once, evenly, by a rank that holds it.

use meshwork_checkpoint::{Dtype, Held, SavePlan, Slice, Tensor, TensorKind};

fn tensor(name: &str, dims: &[u64]) -> Tensor {
    Tensor { name: name.to_owned(), kind: TensorKind::Weight, dtype: Dtype::F32, dims: dims.to_vec() }
}

fn whole(tensor: usize, dims: &[u64], ranks: &[usize]) -> Held {
    Held { tensor, slice: Slice::whole(dims), ranks: ranks.to_vec() }
}

#[test]
fn what_is_refused_says_why() {
    let plan = |tensors: &[Tensor], held: &[Held]| SavePlan::new(2, tensors.to_vec(), held).unwrap_err().to_string();
    let w = [tensor("w", &[4, 2])];
    assert_eq!(plan(&w, &[]), "no rank holds 8 of the 8 elements of w [4, 2]");
    let half = Held { tensor: 0, slice: Slice::new([0..2, 0..2]), ranks: vec![0] };
    assert_eq!(plan(&w, &[half]), "no rank holds 4 of the 8 elements of w [4, 2]");
    assert_eq!(plan(&w, &[whole(0, &[4, 3], &[0])]), "slice [0:4, 0:3] of w does not lie in its extents [4, 2]");
    let nobody = plan(&w, &[whole(0, &[4, 2], &[2])]);
    assert_eq!(nobody, "slice [0:4, 0:2] is of tensor 0 on ranks [2]; there are 1 tensors and 2 ranks");
    assert_eq!(plan(&[w[0].clone(), w[0].clone()], &[]), "two tensors are called w: give each a name of its own");
    let huge = [tensor("huge", &[1 << 40, 1 << 40])];
    assert!(plan(&huge, &[]).contains("more bytes than can be counted"));
}

/// One large matrix (a vocabulary table), narrow rows, and many small vectors, all on every rank.
#[test]
fn replicas_share_the_bytes_evenly() {
    for world in [1, 2, 3, 4, 7, 8, 16] {
        let all: Vec<usize> = (0..world).collect();
        let mut tensors = vec![tensor("table", &[50_257, 64]), tensor("qkv", &[3, 4, 16, 64])];
        tensors.extend((0..50).map(|layer| tensor(&format!("bias.{layer}"), &[256 + 3 * layer])));
        let held: Vec<Held> = tensors.iter().enumerate().map(|(at, of)| whole(at, &of.dims, &all)).collect();
        let plan = SavePlan::new(world, tensors, &held).unwrap();
        let bytes: Vec<u64> = (0..world).map(|rank| plan.bytes(rank)).collect();
        let total: u64 = plan.tensors().iter().filter_map(|of| of.size()).map(|(_, bytes)| bytes).sum();
        assert_eq!(bytes.iter().sum::<u64>(), total);
        let (most, mean) = (*bytes.iter().max().unwrap() as f64, total as f64 / world as f64);
        assert!(most <= 1.01 * mean, "{world} ranks write {bytes:?}, {mean} on average");
    }
}

/// tp=2 cuts the matrix, dp=2 replicates both, and the norm is on all four ranks. Rank = 2 · dp rank + tp rank.
#[test]
fn every_element_has_one_writer_that_holds_it() {
    let tensors = vec![tensor("w", &[64, 256]), tensor("norm", &[700]), tensor("one", &[])];
    let columns = |tp: u64| Slice::new([0..64, 128 * tp..128 * (tp + 1)]);
    let held = [
        Held { tensor: 0, slice: columns(0), ranks: vec![0, 2] },
        Held { tensor: 0, slice: columns(1), ranks: vec![1, 3] },
        whole(1, &[700], &[0, 1, 2, 3]),
        whole(2, &[], &[3]),
    ];
    let plan = SavePlan::new(4, tensors, &held).unwrap();
    let mut seen = vec![0; 64 * 256];
    for rank in 0..4 {
        let mut end = 0;
        for piece in plan.pieces(rank) {
            assert_eq!((piece.writer, piece.bytes.start), (rank, end), "no holes");
            end = piece.bytes.end;
            let holds = |held: &Held| held.tensor == piece.tensor && held.slice.contains(&piece.slice);
            assert!(held.iter().any(|held| holds(held) && held.ranks.contains(&rank)), "{piece:?}");
            if piece.tensor == 0 {
                let ranges: Vec<_> = piece.slice.ranges().collect();
                for row in ranges[0].clone() {
                    ranges[1].clone().for_each(|column| seen[(row * 256 + column) as usize] += 1);
                }
            }
        }
        assert_eq!(end, plan.bytes(rank));
    }
    assert!(seen.iter().all(|&count| count == 1));
    let bytes: Vec<u64> = (0..4).map(|rank| plan.bytes(rank)).collect();
    assert!(bytes.iter().max().unwrap() - bytes.iter().min().unwrap() <= 4096, "{bytes:?}");
}

#[test]
fn slices_that_overlap_are_written_once() {
    let held = [
        Held { tensor: 0, slice: Slice::new(std::iter::once(0..6)), ranks: vec![0] },
        Held { tensor: 0, slice: Slice::new(std::iter::once(4..8)), ranks: vec![1] },
    ];
    let plan = SavePlan::new(2, vec![tensor("w", &[8])], &held).unwrap();
    let written = |rank| plan.pieces(rank).iter().map(|piece| piece.slice.to_string()).collect::<Vec<_>>();
    assert_eq!((written(0), written(1)), (vec!["[0:6]".to_owned()], vec!["[6:8]".to_owned()]));
}
