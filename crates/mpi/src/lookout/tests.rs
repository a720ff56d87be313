//! No sleep here ends by itself: a rank that nobody wakes fails its test.

use super::*;
use crate::stream::{accept, connect};
use crate::watch::Connection;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Receiver, channel};

const MINUTE: Duration = Duration::from_secs(60);

/// Its ranks sleep until something wakes them.
fn lookout(source: Source) -> Arc<Lookout> {
    Arc::new(Lookout { longest: 60 * MINUTE, ..Lookout::new(source, 1) })
}

/// Lookout at a connection, and its other end.
fn connected() -> (Arc<Lookout>, Arc<Connection>, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let other = connect(listener.local_addr().unwrap(), MINUTE).unwrap();
    let (stream, is_full) = (accept(&listener).unwrap().0, AtomicBool::new(false));
    let connection = Arc::new(Connection { stream, is_full });
    let watch = Watch::new([&connection].into_iter()).unwrap();
    (lookout(Source::Connections(Arc::new(watch))), connection, other)
}

/// A rank that sleeps once, and says so when its wait is over. It sleeps when this returns, or has been woken since.
fn rank(lookout: &Arc<Lookout>) -> (Arc<Bell>, Receiver<()>) {
    let (bell, (tell, told)) = (Arc::new(Bell::new(lookout)), channel());
    let (lookout, own) = (lookout.clone(), bell.clone());
    let heard = own.heard();
    let thread = thread::spawn(move || {
        let waiting = own.enter();
        lookout.sleep(&own, heard, &mut lookout.pause());
        drop(waiting); // hands on that it looks out
        tell.send(()).unwrap();
    });
    let sleeps = || [&bell.is_asleep, &bell.is_at_post].iter().any(|at| at.load(Ordering::SeqCst));
    while !sleeps() && !thread.is_finished() {
        thread::yield_now();
    }
    (bell, told)
}

#[test]
fn a_rank_wakes_for_what_arrives_in_memory() {
    for lookout in [lookout(Source::Nothing), connected().0] {
        let [(first, first_woke), (second, second_woke)] = [rank(&lookout), rank(&lookout)];
        second.ring(false);
        second_woke.recv_timeout(MINUTE).unwrap();
        assert!(first_woke.try_recv().is_err());
        first.ring(false);
        first_woke.recv_timeout(MINUTE).unwrap();
    }
}

/// The first one looks out. When its wait is over another one does.
#[test]
fn a_rank_hands_on_that_it_looks_out() {
    let (lookout, _connection, mut other) = connected();
    let (first, first_woke) = rank(&lookout);
    while !first.is_at_post.load(Ordering::SeqCst) {
        thread::yield_now();
    }
    let (_second, second_woke) = rank(&lookout);
    first.ring(false);
    first_woke.recv_timeout(MINUTE).unwrap();
    second_woke.recv_timeout(MINUTE).unwrap(); // it goes on to look out
    let (third, third_woke) = rank(&lookout);
    while !third.is_at_post.load(Ordering::SeqCst) {
        thread::yield_now();
    }
    other.write_all(b"message").unwrap();
    third_woke.recv_timeout(MINUTE).unwrap();
}

/// The thread of MPI looks out while all ranks compute, wakes for what comes, and makes room for a rank that waits.
#[test]
fn the_thread_of_mpi_looks_out_while_no_rank_waits() {
    let (lookout, _connection, mut other) = connected();
    let spare = |lookout: &Arc<Lookout>| {
        let (lookout, (tell, told)) = (lookout.clone(), channel());
        let begun = lookout.begun.load(Ordering::SeqCst);
        let sleeper = lookout.clone();
        thread::spawn(move || {
            sleeper.sleep_spare(&mut begun.clone(), &mut Pause::of_thread(MINUTE));
            tell.send(()).unwrap();
        });
        while !lookout.is_spare.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        told
    };
    let woke = spare(&lookout);
    let (_bell, rank_woke) = rank(&lookout);
    woke.recv_timeout(MINUTE).unwrap();
    rank_woke.recv_timeout(MINUTE).unwrap();
    let woke = spare(&lookout);
    assert!(woke.try_recv().is_err());
    other.write_all(b"message").unwrap();
    woke.recv_timeout(MINUTE).unwrap();
}
