//! The README shows output in the format of a real run, and its figures are close to those of a real run.

use tests::readme::{
    PROGRAM_LIMIT_MB, check_figures, check_samples, map_figures, samples, written_figure,
};

const README: &str = include_str!("../../../README.md");

#[test]
#[ignore = "needs root"]
fn samples_in_the_readme_have_the_form_of_a_run() -> anyhow::Result<()> {
    check_samples(README, &samples()?)
}

#[test]
#[ignore = "needs root"]
fn figures_in_the_readme_are_about_those_of_a_run() -> anyhow::Result<()> {
    check_figures(README, &map_figures()?)?;
    let program = written_figure(README, "program")?;
    assert!(program <= PROGRAM_LIMIT_MB, "{program}");
    Ok(())
}
