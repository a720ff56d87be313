use meshwork_tensor::cpu::kernels::*;
use std::time::Instant;
fn main() {
    let n = 1 << 15;
    let x: Vec<f32> = (0..n).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
    let mut y = vec![0.0; n];
    let time = |name: &str, f: &mut dyn FnMut()| {
        let mut best = f64::MAX;
        for _ in 0..300 {
            let t = Instant::now();
            f();
            best = best.min(t.elapsed().as_secs_f64());
        }
        println!("{name} {:.3} ns/elem", best * 1e9 / n as f64);
    };
    time("gelu", &mut || gelu::gelu(&x, &mut y));
    let dy = x.clone();
    let b = vec![0.1f32; 1024];
    let mut db = vec![0.1f32; 1024];
    time("gelu_backward", &mut || gelu::gelu_backward(&x, &dy, &mut y));
    time("bias_gelu", &mut || gelu::bias_gelu(&x, &b, &mut y));
    time("bias_gelu_backward", &mut || gelu::bias_gelu_backward(&x, &b, &dy, &mut y, &mut db));
    time("bias_backward", &mut || pointwise::bias_backward(&x, &mut db));
    time("exp", &mut || {
        meshwork_core::simd::wide(
            #[inline(always)]
            || {
                for (y, x) in y.iter_mut().zip(&x) {
                    *y = Float::exp(*x)
                }
            },
        )
    });
    let cols = loss::Columns::whole(n);
    let mut m = [0f32];
    let mut s = [0f32];
    let mut t = [0f32];
    time("row_stats", &mut || loss::row_stats(cols, &x, &[3], &mut m, &mut s, &mut t));
}
