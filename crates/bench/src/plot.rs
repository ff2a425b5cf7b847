//! Plot of an experiment: medians with their spread, one line per
//! series. One plot for each kind of figure and core state.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

use crate::sample::{CoreProximity, Results};
use crate::statistics::{SampleGroup, groups};

/// Size, pixels.
const SIZE: (u32, u32) = (760, 440);

/// Space for the labels of the axes, pixels.
const X_LABELS: u32 = 44;
const Y_LABELS: u32 = 64;

/// If the parameters' ratio exceeds this, their axis is logarithmic.
const LOGARITHMIC_RATIO: f64 = 40.0;

/// Colours that most people can distinguish (Okabe and Ito 2008, "Color Universal Design").
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(0, 0, 0),
    RGBColor(128, 128, 128),
];

/// Writes the plot of one kind of figure in one state.
/// False if there are fewer than two parameters to plot.
pub fn write(path: &Path, results: &Results, what: &str, state: CoreProximity) -> Result<bool> {
    let groups: Vec<SampleGroup> =
        groups(&results.samples, what).into_iter().filter(|group| group.state == state).collect();
    let sample = results.samples.iter().find(|sample| sample.what == what);
    let (Some(first), Some(sample)) = (groups.first(), sample) else { return Ok(false) };
    let (mut least, mut most, mut top) = (first.x, first.x, 0.0f64);
    for group in &groups {
        (least, most) = (least.min(group.x), most.max(group.x));
        top = top.max(group.value.most);
    }
    if least == most {
        return Ok(false);
    }
    let logarithmic = least > 0.0 && most / least > LOGARITHMIC_RATIO;
    let place = |x: f64| if logarithmic { x.log10() } else { x };
    let pad = ((place(most) - place(least)) * 0.06).max(0.05);
    let area = SVGBackend::new(path, SIZE).into_drawing_area();
    let draw = || -> Result<(), Box<dyn std::error::Error>> {
        area.fill(&WHITE)?;
        let caption =
            format!("{}: {what} ({}), cores {}", results.experiment, sample.unit, state.word());
        let mut chart = ChartBuilder::on(&area)
            .caption(caption, ("sans-serif", 16))
            .margin(10)
            .x_label_area_size(X_LABELS)
            .y_label_area_size(Y_LABELS)
            .build_cartesian_2d(
                place(least) - pad..place(most) + pad,
                0.0..(top * 1.15).max(f64::MIN_POSITIVE),
            )?;
        chart
            .configure_mesh()
            .light_line_style(WHITE)
            .x_desc(&sample.x_unit)
            .y_desc(format!("{what}, {}", sample.unit))
            .x_label_formatter(&|at| short(if logarithmic { 10f64.powf(*at) } else { *at }))
            .draw()?;
        let mut names: Vec<&str> = Vec::new();
        for group in &groups {
            if !names.contains(&&*group.series) {
                names.push(&group.series);
            }
        }
        for (name, colour) in names.iter().zip(COLOURS.iter().cycle()) {
            let own: Vec<&SampleGroup> =
                groups.iter().filter(|group| group.series == **name).collect();
            let line = own.iter().map(|group| (place(group.x), group.value.median));
            chart.draw_series(LineSeries::new(line, colour.stroke_width(2)))?.label(*name).legend(
                move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)),
            );
            chart.draw_series(own.iter().map(|group| {
                let value = group.value;
                ErrorBar::new_vertical(
                    place(group.x),
                    value.least,
                    value.median,
                    value.most,
                    colour.filled(),
                    8,
                )
            }))?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .border_style(RGBColor(200, 200, 200))
            .draw()?;
        area.present()?;
        Ok(())
    };
    draw().map_err(|error| anyhow!("{}: {error}", path.display()))?;
    Ok(true)
}

/// Formats a number in few characters.
pub fn short(number: f64) -> String {
    match number.abs() {
        size if size >= 1e6 => format!("{:.1}M", number / 1e6),
        size if size >= 1e4 => format!("{:.0}k", number / 1e3),
        size if size >= 100.0 || number.fract() == 0.0 => format!("{number:.0}"),
        size if size >= 1.0 => format!("{number:.1}"),
        _ => format!("{number:.3}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::tests::results;

    #[test]
    fn plot_has_exactly_the_series_of_its_state() {
        let results = results(&[
            ("pdp", 2.0, 1.0, 60.0),
            ("pdp", 900_000.0, 0.9, 60.0),
            ("kernel", 2.0, 0.5, 60.0),
            ("ovs", 2.0, 0.5, 300.0),
        ]);
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("plot.svg");
        assert!(write(&path, &results, "rate", CoreProximity::Near).unwrap());
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.starts_with("<svg") && text.contains("pdp") && text.contains("kernel"));
        assert!(!text.contains("ovs"));
        assert!(!write(&path, &results, "rate", CoreProximity::Far).unwrap(), "a single parameter");
        assert!(!write(&path, &results, "rate", CoreProximity::Between).unwrap());
        assert!(!write(&path, &results, "loss", CoreProximity::Near).unwrap());
    }

    #[test]
    fn numbers_are_short() {
        let numbers = [968_428.0, 1_200_000.0, 64.0, 0.5, 12.34, 531.7].map(short);
        assert_eq!(numbers, ["968k", "1.2M", "64", "0.500", "12.3", "532"]);
    }
}
