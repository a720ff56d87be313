//! Buffers: typed views, parts, and memory that is traded.

use meshwork_core::{Buffer, BufferError, DType, HostMemory, Memory};
use std::sync::Arc;

#[test]
fn typed_views_check_type_range_and_sharing() {
    let mut buffer = Buffer::from_vec(vec![1i32, 2, 3]);
    assert_eq!(buffer.as_slice::<f32>().unwrap_err().to_string(), "the buffer holds i32, it was asked for as f32");
    assert_eq!(buffer.slice(2..4).unwrap_err().to_string(), "elements 2..4 are not inside the buffer's 0..3");
    let tail = buffer.slice(1..3).unwrap();
    assert_eq!(tail.slice(1..2).unwrap().as_slice::<i32>().unwrap(), [3]);
    assert!(matches!(buffer.as_mut_slice::<i32>(), Err(BufferError::Shared { count: 3, .. })));
    drop(tail);
    assert!(buffer.is_unique());
    buffer.as_mut_slice::<i32>().unwrap()[2] = 9;
    assert_eq!(buffer.as_slice::<i32>().unwrap(), [1, 2, 9]);
}

#[test]
fn a_part_is_written_without_sharing() {
    let mut buffer = Buffer::from_vec(vec![1i32, 2, 3, 4]).slice(1..4).unwrap();
    let mut part = buffer.window(1..3).unwrap();
    part.as_mut_slice::<i32>().unwrap()[0] = 7;
    assert_eq!(part.as_slice::<i32>().unwrap(), [7, 4]);
    drop(part);
    assert_eq!(buffer.as_slice::<i32>().unwrap(), [2, 7, 4]);
    assert!(buffer.window(2..4).is_err() && buffer.count() == 3);
    let other = buffer.clone();
    assert!(buffer.window(0..1).unwrap().as_mut_slice::<i32>().is_err() && other.count() == 3);
}

#[test]
fn zeros_are_zero_and_aligned() {
    for count in [0, 1, 63, 1000] {
        let buffer = Buffer::zeros(DType::F64, count);
        let elements = buffer.as_slice::<f64>().unwrap();
        assert_eq!(elements, vec![0.0; count]);
        assert_eq!(elements.as_ptr() as usize % 64, 0);
    }
}

#[test]
#[should_panic(expected = "a buffer of 4611686018427387904 of f32 overflows the address space")]
fn a_buffer_is_never_smaller_than_it_says() {
    Buffer::zeros(DType::F32, 1 << 62); // 2^64 bytes: 0 where arithmetic wraps
}

#[test]
fn buffers_trade_bytes_only_if_nobody_else_has_them() {
    let fresh = |v: [f32; 3]| Buffer::from_vec(v.to_vec());
    let (mut a, mut b) = (fresh([1.0, 2.0, 3.0]), fresh([4.0, 5.0, 6.0]));
    let at = |buffer: &Buffer| buffer.as_bytes().unwrap().as_ptr();
    let before = (at(&a), at(&b));
    assert!(a.trade(&mut b));
    assert_eq!((at(&b), at(&a)), before);
    assert_eq!(
        (a.as_slice::<f32>().unwrap(), b.as_slice::<f32>().unwrap()),
        (&[4.0, 5.0, 6.0][..], &[1.0, 2.0, 3.0][..])
    );

    let mut tail = a.slice(1..3).unwrap();
    assert!(!a.trade(&mut b) && !b.trade(&mut a), "`tail` reads the memory of `a`");
    drop(a);
    let mut head = fresh([7.0, 8.0, 9.0]).slice(0..2).unwrap();
    assert!(!tail.trade(&mut head), "not at the same offset");
    assert!(!head.trade(&mut Buffer::zeros(DType::I32, 2)), "another type");
    assert!(!head.trade(&mut Buffer::zeros(DType::F32, 3)), "another count");
    let mut large = Buffer::zeros(DType::F32, 100).slice(0..2).unwrap();
    assert!(!head.trade(&mut large), "more memory below it");
    assert_eq!((head.as_slice::<f32>().unwrap(), tail.as_slice::<f32>().unwrap()), (&[7.0, 8.0][..], &[5.0, 6.0][..]));
}

#[test]
fn memory_must_hold_the_elements() {
    let memory = Arc::new(HostMemory::zeroed(64));
    assert!(Buffer::from_memory(memory.clone(), DType::F32, 16).is_ok());
    let error = Buffer::from_memory(memory.clone(), DType::F32, 17).unwrap_err();
    assert_eq!(error.to_string(), "17 of f32 do not fit into memory of 64 bytes");
    assert!(Buffer::from_memory(memory, DType::F32, usize::MAX).is_err());
}

#[test]
fn memory_without_host_bytes_has_a_size_only() {
    #[derive(Debug)]
    struct Opaque(usize);
    impl Memory for Opaque {
        fn bytes(&self) -> usize {
            self.0
        }
    }
    let mut buffer = Buffer::from_memory(Arc::new(Opaque(1 << 40)), DType::Bf16, 1 << 39).unwrap();
    assert!(!buffer.is_host());
    assert_eq!(buffer.slice(8..16).unwrap().bytes(), 16);
    assert!(matches!(buffer.as_bytes_mut(), Err(BufferError::NotHost { .. })));
}
