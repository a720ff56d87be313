//! Event files of TensorBoard: scalars by step.
//!
//! A file is a list of records, `[length: u64][crc of length: u32][data][crc of data: u32]`, all little-endian; a crc
//! is a CRC-32C, rotated and offset. The data are `Event` messages of protocol buffers. Only the fields of scalars
//! are written:
//!
//! ```text
//! Event   { 1: wall_time double, 2: step int64, 3: file_version string, 5: summary Summary }
//! Summary { 1: repeated Value }        Value { 1: tag string, 2: simple_value float }
//! ```

use crate::error::OutputError;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

const WHAT: &str = "TensorBoard events";

/// Writes scalars to a new event file in a folder, each record at once.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    file: File,
}

impl TensorBoard {
    /// A new file in `folder`, which is made if it does not exist. Files of earlier runs stay: TensorBoard reads them
    /// in the order of their times.
    pub fn create(folder: &Path) -> Result<Self, OutputError> {
        fs::create_dir_all(folder).map_err(OutputError::writing(WHAT, folder))?;
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let name = format!(
            "events.out.tfevents.{:010}.meshwork.{}.{}",
            time.as_secs(),
            std::process::id(),
            time.subsec_nanos()
        );
        let path = folder.join(name);
        let file = File::create_new(&path).map_err(OutputError::writing(WHAT, &path))?;
        let mut events = Self { path, file };
        let mut version = Message::default();
        version.double(1, time.as_secs_f64()).bytes(3, b"brain.Event:2");
        events.record(&version.0)?;
        Ok(events)
    }

    /// Writes the values of some tags at a step.
    ///
    /// # Errors
    /// When they cannot be written.
    pub fn scalars<'a>(
        &mut self,
        step: u64,
        values: impl IntoIterator<Item = (&'a str, f64)>,
    ) -> Result<(), OutputError> {
        let mut summary = Message::default();
        for (tag, value) in values {
            let mut scalar = Message::default();
            scalar.bytes(1, tag.as_bytes()).float(2, value as f32);
            summary.bytes(1, &scalar.0);
        }
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut event = Message::default();
        event.double(1, time.as_secs_f64()).integer(2, step).bytes(5, &summary.0);
        self.record(&event.0)
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn record(&mut self, data: &[u8]) -> Result<(), OutputError> {
        let length = (data.len() as u64).to_le_bytes();
        let record = [&length[..], &masked_crc(&length), data, &masked_crc(data)].concat();
        self.file.write_all(&record).map_err(OutputError::writing(WHAT, &self.path))
    }
}

fn masked_crc(data: &[u8]) -> [u8; 4] {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8).to_le_bytes()
}

/// A message of protocol buffers, field by field.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// The key of a field: its number, and how it is stored.
    fn key(&mut self, field: u64, wire_type: u64) {
        self.varint(field << 3 | wire_type);
    }

    fn integer(&mut self, field: u64, value: u64) -> &mut Self {
        self.key(field, 0);
        self.varint(value);
        self
    }

    fn double(&mut self, field: u64, value: f64) -> &mut Self {
        self.key(field, 1);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(&mut self, field: u64, value: &[u8]) -> &mut Self {
        self.key(field, 2);
        self.varint(value.len() as u64);
        self.0.extend(value);
        self
    }

    fn float(&mut self, field: u64, value: f32) -> &mut Self {
        self.key(field, 5);
        self.0.extend(value.to_le_bytes());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_those_of_protocol_buffers() {
        let mut message = Message::default();
        message.integer(2, 300).bytes(1, b"ab").float(2, 1.0).double(1, 2.0);
        let wanted: [&[u8]; 4] = [
            &[0x10, 0xac, 0x02],
            &[0x0a, 2, b'a', b'b'],
            &[0x15, 0, 0, 0x80, 0x3f],
            &[0x09, 0, 0, 0, 0, 0, 0, 0, 0x40],
        ];
        assert_eq!(message.0, wanted.concat());
        // The check value of CRC-32C.
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn two_files_of_one_folder_do_not_meet() {
        let folder = tempfile::tempdir().unwrap();
        let files = [0, 1].map(|_| TensorBoard::create(&folder.path().join("runs")).unwrap().path().to_owned());
        assert_ne!(files[0], files[1]);
        let error = TensorBoard::create(&files[0].join("below")).unwrap_err().to_string();
        assert!(error.starts_with("cannot write TensorBoard events to "), "{error}");
    }
}
