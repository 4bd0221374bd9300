//! Draws two panels side by side above one legend. All axes are logarithmic. The colours follow the
//! reader's choice of light or dark.

use std::fmt::Write as _;

use super::Curve;
use crate::sizes;

/// Sizes of the picture, of a panel, and of the margins for labels.
const WIDTH: f64 = 1000.0;
const PANEL: [f64; 2] = [405.0, 300.0];
const LEFT: [f64; 2] = [75.0, 575.0];
const TOP: f64 = 45.0;
const LEGEND_LINE: f64 = 20.0;

/// Colours that are distinct on white and on black, also for colour-blind readers.
const COLOURS: [&str; 8] =
    ["#3b83c9", "#d98324", "#2f9e73", "#c2569b", "#8a7be0", "#b0902a", "#c5544a", "#7d8894"];

const STYLE: &str = "\
svg { --ink: #1b1f24; --grid: #d8dce0; background: #ffffff; font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6e8ea; --grid: #3a4048; background: #15181c; \
} }
text { fill: var(--ink); } .grid { stroke: var(--grid); fill: none; }
.curve { fill: none; stroke-width: 2; } .tail { stroke-dasharray: 4 4; stroke-width: 1.2; }";

struct Panel {
    title: &'static str,
    left: f64,
    sizes: Span,
    values: Span,
    label: fn(f64) -> String,
}

#[derive(Clone, Copy)]
struct Span {
    base: f64,
    from: f64,
    to: f64,
}

impl Span {
    /// Returns the smallest range between whole powers of `base` that contains all values.
    fn around(base: f64, values: impl Iterator<Item = f64>) -> Span {
        let logs = values.map(|value| value.log(base));
        let (low, high) =
            logs.fold((f64::MAX, f64::MIN), |(low, high), log| (low.min(log), high.max(log)));
        match low <= high {
            true => Span { base, from: low.floor(), to: high.ceil().max(low.floor() + 1.0) },
            false => Span { base, from: 0.0, to: 1.0 },
        }
    }

    fn place(&self, value: f64) -> f64 {
        (value.log(self.base) - self.from) / (self.to - self.from)
    }

    /// Returns at most eleven powers of the base, evenly spaced.
    fn ticks(&self) -> impl Iterator<Item = f64> {
        let step = ((self.to - self.from) / 10.0).ceil().max(1.0);
        let (base, from) = (self.base, self.from);
        (0..=((self.to - self.from) / step) as u32)
            .map(move |n| base.powf(from + f64::from(n) * step))
    }
}

impl Panel {
    fn at(&self, size: f64, value: f64) -> [f64; 2] {
        let [width, height] = PANEL;
        [
            self.left + self.sizes.place(size) * width,
            TOP + (1.0 - self.values.place(value)) * height,
        ]
    }

    fn axes(&self, into: &mut String) {
        let ([width, height], left) = (PANEL, self.left);
        let (right, bottom) = (left + width, TOP + height);
        let _ = writeln!(
            into,
            r#"<text x="{left}" y="{}" font-weight="600">{}</text>"#,
            TOP - 20.0,
            self.title
        );
        for value in self.values.ticks() {
            let [_, y] = self.at(1.0, value);
            let label = (self.label)(value);
            let _ = writeln!(into, r#"<path class="grid" d="M{left:.1} {y:.1}H{right:.1}"/>"#);
            let _ = writeln!(
                into,
                r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{label}</text>"#,
                left - 8.0,
                y + 4.0
            );
        }
        for size in self.sizes.ticks() {
            let [x, _] = self.at(size, 1.0);
            let label = sizes::show(size as usize);
            let _ = writeln!(into, r#"<path class="grid" d="M{x:.1} {TOP:.1}V{bottom:.1}"/>"#);
            let _ = writeln!(
                into,
                r#"<text x="{x:.1}" y="{:.1}" text-anchor="middle">{label}</text>"#,
                bottom + 18.0
            );
        }
        let _ = writeln!(
            into,
            r#"<text x="{right}" y="{:.1}" text-anchor="end">payload, bytes</text>"#,
            bottom + 38.0
        );
    }

    fn curve(&self, points: &[[f64; 2]], colour: &str, class: &str, into: &mut String) {
        let path: Vec<String> = points
            .iter()
            .map(|&[size, value]| self.at(size, value))
            .map(|[x, y]| format!("{x:.1} {y:.1}"))
            .collect();
        if path.len() > 1 {
            let _ = writeln!(
                into,
                r#"<path class="{class}" stroke="{colour}" d="M{}"/>"#,
                path.join("L")
            );
        }
        for &[size, value] in points {
            let ([x, y], label) = (self.at(size, value), (self.label)(value));
            let _ = writeln!(
                into,
                r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"><title>{}: {label}</title></circle>"#,
                sizes::show(size as usize)
            );
        }
    }
}

/// Returns the picture of all curves as SVG text.
pub fn draw(curves: &[Curve]) -> String {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let latencies = points().filter_map(|point| point.latency).flatten();
    let sizes = Span::around(2.0, points().map(|point| point.size));
    let latency = Panel {
        title: "Latency: p50, and p99 dashed",
        left: LEFT[0],
        sizes,
        values: Span::around(10.0, latencies),
        label: duration,
    };
    let bandwidth = Panel {
        title: "Bandwidth",
        left: LEFT[1],
        sizes,
        values: Span::around(10.0, points().map(|point| point.bytes_per_s)),
        label: rate,
    };
    let legend = TOP + PANEL[1] + 60.0;
    let height = legend + LEGEND_LINE * curves.len() as f64;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\">\n\
        <title>Latency and bandwidth by payload size</title>\n<style>\n{STYLE}\n</style>\n"
    );
    latency.axes(&mut svg);
    bandwidth.axes(&mut svg);
    for (number, curve) in curves.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let mut points = curve.points.clone();
        points.sort_by(|a, b| a.size.total_cmp(&b.size));
        for (which, class) in ["curve", "curve tail"].iter().enumerate() {
            let line: Vec<[f64; 2]> = points
                .iter()
                .filter_map(|point| Some([point.size, point.latency?[which]]))
                .collect();
            latency.curve(&line, colour, class, &mut svg);
        }
        let line: Vec<[f64; 2]> =
            points.iter().map(|point| [point.size, point.bytes_per_s]).collect();
        bandwidth.curve(&line, colour, "curve", &mut svg);
        let (x, y) = (LEFT[0], legend + LEGEND_LINE * number as f64);
        let _ = writeln!(svg, r#"<path stroke="{colour}" stroke-width="3" d="M{x} {y:.1}h24"/>"#);
        let _ = writeln!(
            svg,
            r#"<text x="{}" y="{:.1}">{}</text>"#,
            x + 34.0,
            y + 4.0,
            escape(&curve.name)
        );
    }
    svg + "</svg>\n"
}

fn duration(ns: f64) -> String {
    match ns {
        n if n < 1e3 => format!("{} ns", rounded(n)),
        n if n < 1e6 => format!("{} us", rounded(n / 1e3)),
        n if n < 1e9 => format!("{} ms", rounded(n / 1e6)),
        n => format!("{} s", rounded(n / 1e9)),
    }
}

fn rate(bytes: f64) -> String {
    match bytes {
        b if b < 1e6 => format!("{} KB/s", rounded(b / 1e3)),
        b if b < 1e9 => format!("{} MB/s", rounded(b / 1e6)),
        b => format!("{} GB/s", rounded(b / 1e9)),
    }
}

/// Rounds to three decimals. `Display` then writes no trailing zeros.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::Point;
    use super::*;

    fn curve(name: &str, latency: Option<[f64; 2]>) -> Curve {
        let points =
            [8.0, 1024.0].map(|size| Point { size, latency, bytes_per_s: size * 1e6 }).to_vec();
        Curve { name: name.into(), points }
    }

    #[test]
    fn every_curve_has_its_lines_dots_and_name() {
        let svg = draw(&[curve("put <shm>", Some([100.0, 300.0])), curve("sim", None)]);
        assert_eq!(svg.matches("class=\"curve\"").count(), 3, "{svg}");
        assert_eq!(svg.matches("class=\"curve tail\"").count(), 1, "{svg}");
        assert_eq!(svg.matches("<circle").count(), 8, "{svg}");
        assert!(
            svg.contains("put &lt;shm&gt;")
                && svg.contains("1K: 300 ns")
                && svg.ends_with("</svg>\n")
        );
    }

    #[test]
    fn places_are_inside_of_the_picture() {
        for points in [vec![], vec![1.0], vec![8.0, 8.0], vec![1.0, 1e12], vec![0.001, 5e9]] {
            let span = Span::around(10.0, points.iter().copied());
            assert!(
                points.iter().all(|&value| (-1e-9..=1.0 + 1e-9).contains(&span.place(value))),
                "{points:?}"
            );
            assert!((1..=12).contains(&span.ticks().count()), "{points:?}");
        }
        let svg = draw(&[]);
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    }
}
