//! Writes the file of `--hist`: each measured duration and its count, as CSV.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use super::args::{Test, name};
use super::clock::Clock;
use super::failure::{Failure, Outcome};
use super::histogram::Histogram;

pub struct HistogramFile {
    path: PathBuf,
    out: BufWriter<File>,
}

impl HistogramFile {
    pub fn create(path: &Path) -> Outcome<Self> {
        let file = File::create(path).map_err(|error| {
            Failure::usage(format!("--hist {}: {error}; choose another file", path.display()))
        })?;
        let mut file = HistogramFile { path: path.to_owned(), out: BufWriter::new(file) };
        file.write("test,size,lat_ns,count\n")?;
        Ok(file)
    }

    pub fn add(
        &mut self,
        test: Test,
        size: usize,
        histogram: &Histogram,
        clock: &Clock,
        divisor: f64,
    ) -> Outcome {
        let test = name(test);
        let lines: String = histogram
            .counts()
            .map(|(ticks, count)| {
                format!("{test},{size},{:.3},{count}\n", clock.ns(1) * ticks / divisor)
            })
            .collect();
        self.write(&lines)
    }

    fn write(&mut self, text: &str) -> Outcome {
        self.out
            .write_all(text.as_bytes())
            .and_then(|()| self.out.flush())
            .map_err(|error| Failure::run(format!("cannot write {}: {error}", self.path.display())))
    }
}
