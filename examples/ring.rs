//! The SPSC ring alone: a million numbers from one thread to another, without allocation or locks.

use std::error::Error;
use std::mem::MaybeUninit;
use std::thread;

use fishplate::core::sync::ring::{Header, split};

const COUNT: u64 = 1_000_000;

fn main() -> Result<(), Box<dyn Error>> {
    let (mut header, mut slots) = (Header::new(), [MaybeUninit::<u64>::uninit(); 1024]);
    let (mut producer, mut consumer) = split(&mut header, &mut slots)?;
    let sum = thread::scope(|scope| {
        scope.spawn(move || {
            for number in 0..COUNT {
                while producer.push(number).is_err() {
                    thread::yield_now();
                }
            }
        });
        let (mut sum, mut next) = (0, 0);
        while next < COUNT {
            match consumer.pop() {
                Some(number) if number == next => (sum, next) = (sum + number, next + 1),
                Some(number) => return Err(format!("{number} came in place of {next}")),
                None => thread::yield_now(),
            }
        }
        Ok(sum)
    })?;
    println!("{COUNT} numbers in order, their sum is {sum}");
    Ok(())
}
