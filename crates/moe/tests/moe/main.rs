//! Layers with experts: against a dense oracle, over meshes, on other devices, and wrongly used.

mod chunks;
mod compressed;
mod devices;
mod mesh;
mod misuse;
mod oracle;
mod published;
mod world;
