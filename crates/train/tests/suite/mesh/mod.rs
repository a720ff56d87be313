//! Whole training steps on meshes of up to 16 ranks, compared with the run of one rank, with the predictions of meta
//! and record, with closed formulas and with PyTorch.
//!
//! | module | what it shows |
//! |---|---|
//! | `parity` | any mesh gives the loss, gradients, norm and weights of the one-rank run, and the work is really split |
//! | `adamw` | twenty steps of AdamW follow the one-rank run |
//! | `canonical` | in canonical numerics they have its bits |
//! | `mixed` | weights, activations and gradients in 16 bits, with a loss scale, train as f32 does, on any mesh alike |
//! | `lora` | adapters beside frozen weights train on any mesh as on one rank, in canonical numerics with its bits |
//! | `loss_chunk` | a loss whose logits exist for a few tokens at a time is that of all logits, and takes less memory |
//! | `offload` | what leaves memory comes back with its bits, and less is held meanwhile |
//! | `opaque` | a device whose memory the host cannot read trains with the CPU's bits, and a step downloads its report alone |
//! | `overlap` | gradients are reduced while backward runs |
//! | `determinism` | one mesh gives the same bits on every run, whatever the timing |
//! | `failures` | a rank that breaks down stops every other one with a named error; bad numbers leave the weights alone |
//! | `evaluation` | validation loss and next-token logits do not depend on the mesh |
//! | `partition` | layers assigned by cost train as on one rank |
//! | `products` | products in bf16 and TF32 train as those in f32 do, on any mesh alike, with the same bits on every run |
//! | `pytorch` | forward, backward and optimizer steps against recorded numbers |
//! | `schedules` | overlapping steps, versions of the weights, and kept activations are as the schedule says |
//! | `steady_state` | after two steps nothing is allocated from the system |
//! | `streams` | PipeDream and PipeDream-2BW follow their update equations |

mod adamw;
mod canonical;
mod cases;
mod determinism;
mod evaluation;
mod failures;
mod lora;
mod loss_chunk;
mod mixed;
mod offload;
mod opaque;
mod overlap;
mod parity;
mod partition;
mod products;
mod pytorch;
mod recompute;
mod saved;
mod schedules;
mod split_work;
mod steady_state;
mod streams;
mod world;
mod zero;
