//! Without a build script, cargo would not select the features of the build dependencies.

fn main() {}
