//! What a layer of a transformer keeps for backward in 16 bits: s·b·h·(34 + 5·a·s/h) bytes (Korthikanti et al. 2022,
//! section 4, table 2), if attention makes its scores whole, one operation after the other.

use meshwork_core::rules::Operand;
use meshwork_core::{Axis, DType, Mesh, Rank, SpmdError, Ty, Types};
use meshwork_nn::LayerNorm;
use meshwork_tensor::meta::Meta;
use meshwork_tensor::op::MlpKind;
use meshwork_tensor::tape::{Backward, Encoded, Encoding, Forward, HalfType, Keep, Mode, Op, Position};
use meshwork_tensor::{Declarations, Init, Params, Result, Tape, Tensor};
use meshwork_tensor_parallel::{ColumnLinear, ParallelMlp, Region, RowLinear};
use std::rc::Rc;
use std::sync::Arc;

/// A product of two values by heads, of which backward needs both. On a device without values only its shape counts.
#[derive(Debug)]
struct Product {
    name: &'static str,
    /// Of the result, `[b, ..]`.
    shape: [usize; 4],
    /// The dim of the result that has the heads, which tp cuts.
    heads: usize,
}

impl Op for Product {
    fn name(&self) -> &'static str {
        self.name
    }

    fn operands(&self) -> &'static [&'static str] {
        &["a", "b"]
    }

    fn infer(&self, operands: &[Operand<'_>]) -> std::result::Result<Types, SpmdError> {
        Ok(operands[0].types.with(Axis::Tp, Ty::Shard(self.heads)))
    }

    fn forward(&self, cx: &mut Forward<'_>, inputs: &[&Tensor]) -> Result<Tensor> {
        cx.save_input(0)?;
        cx.save_input(1)?;
        Tensor::zeros(inputs[0].device(), DType::F32, self.shape)
    }

    fn backward(&self, _cx: &mut Backward<'_>, _grad: Tensor) -> Result<Vec<Option<Tensor>>> {
        unreachable!("nothing goes backward here")
    }
}

/// The sizes of a layer, named as in the paper.
struct Layer {
    s: usize,
    b: usize,
    h: usize,
    a: usize,
}

impl Layer {
    /// Bytes that a rank of tp keeps of the layer beside its input, which is the caller's.
    fn kept(&self, t: usize, region: Region) -> Result<u64> {
        let &Self { s, b, h, a } = self;
        let (dim, init, p) = (h / a, || Init::Normal { std: 0.02 }, 0.1);
        let mesh = Mesh::new([(Axis::Tp, t)]).expect("one axis");
        let mut declared = Declarations::new();
        let d = &mut declared;
        let heads = |d: &mut Declarations, name| ColumnLinear::new(d, &mesh, name, h, (&[a, dim], 0), true, init());
        let [ln1, ln2] = [LayerNorm::new(d, "ln1", h, true)?, LayerNorm::new(d, "ln2", h, true)?];
        let [q, k, v] = [heads(d, "q")?, heads(d, "k")?, heads(d, "v")?];
        let out = RowLinear::new(d, &mesh, "out", (&[a, dim], 0), h, true, init())?;
        let mlp = ParallelMlp::new(d, &mesh, "mlp", MlpKind::Gelu, [h, 4 * h], true, [init(), init()])?;

        let (rank, device) = (Arc::new(Rank::recording(&mesh, 0).expect("a rank")), Meta::device());
        let layout = [declared.ids().collect()];
        let params = Params::new(Arc::new(declared), &mesh, rank.coords(), &device, &layout, 0)?;
        let policy = Rc::new(Encoded::new(Rc::new(Keep), Encoding::Half(HalfType::Bf16)));
        let tape = Tape::with_policy(rank, Arc::new(params), device.clone(), Mode::Train, Position::default(), policy);
        let x = Tensor::zeros(&device, DType::F32, [b, region.local_seq(s, tape.rank().mesh())?, h])?;
        let x = tape.input(x, Types::NONE.with(Axis::Tp, region.ty(Axis::Tp)));
        let before = device.meter().live_bytes();
        let y = {
            let inner = region.enter(&ln1.forward(&tape, &x)?)?;
            let [q, k, v] = [q.forward(&tape, &inner)?, k.forward(&tape, &inner)?, v.forward(&tape, &inner)?];
            let scores = tape.apply(Product { name: "scores", shape: [b, a / t, s, s], heads: 1 }, &[&q, &k])?;
            let weights = scores.softmax()?.dropout(p, "weights")?;
            let mixed = tape.apply(Product { name: "mix", shape: [b, s, a / t, dim], heads: 2 }, &[&weights, &v])?;
            let x = out.forward(&tape, &mixed, region, Some(&x), p)?;
            mlp.forward(&tape, &ln2.forward(&tape, &x)?, region, Some(&x), p)?
        };
        Ok(device.meter().live_bytes() - before - y.tensor().buffer().bytes() as u64)
    }
}

#[test]
fn a_layer_keeps_what_the_published_formula_says() {
    for (layer, t) in [
        (Layer { s: 128, b: 2, h: 64, a: 8 }, 1),
        (Layer { s: 128, b: 2, h: 64, a: 8 }, 8),
        (Layer { s: 2048, b: 4, h: 6144, a: 64 }, 8), // the paper's model of 22 billion parameters
    ] {
        let Layer { s, b, h, a } = layer;
        let (sbh, scores) = (s * b * h, 5 * a * s * s * b / t);
        let published = sbh * 10 + sbh * 24 / t + scores;
        // Where elements are dropped is drawn again in backward: a byte less for each of two results and of the scores.
        // Ours has the mean and the deviation of both norms in f32.
        let (masks, statistics) = (2 * sbh + a * s * s * b / t, 2 * 2 * 4 * s * b);
        let kept = layer.kept(t, Region::INVARIANT).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(kept as usize, published - masks + statistics, "t = {t}");
        if t == 1 {
            assert_eq!(published, sbh * 34 + scores);
        }
    }
}

/// With sequence parallelism the published layer keeps 34/t: it gathers the inputs of its products again in backward.
/// Ours keeps the two inputs that it gathered.
#[test]
fn sequence_parallelism_cuts_what_is_between_the_products() {
    let (layer, t) = (Layer { s: 128, b: 2, h: 64, a: 8 }, 8);
    let Layer { s, b, h, a } = layer;
    let (sbh, scores) = (s * b * h, 4 * a * s * s * b / t);
    let statistics = 2 * 2 * 4 * s * b / t;
    let kept = layer.kept(t, Region::SEQUENCE_PARALLEL).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(kept as usize, sbh * (32 - 4) / t + 4 * sbh + scores + statistics);
}
