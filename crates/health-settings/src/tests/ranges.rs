//! Ranges apply wherever a value comes from, and all documents show them.

use std::any::TypeId;
use std::time::Duration;

use super::*;

/// A ranged setting's value with this amount, as users write it.
fn with_amount(arg: &Arg, amount: Amount) -> String {
    match form::name(arg) {
        "probe" => format!("icmp={amount}"),
        "masquerade-ports" => format!("{amount}-{amount}"),
        _ => amount.to_string(),
    }
}

/// The nearest amounts below and above a range that can be written.
fn beside(range: &Range) -> [Option<Amount>; 2] {
    let step = |limit: Duration| match limit < Duration::from_secs(1) {
        true => Duration::from_millis(1),
        false => Duration::from_secs(1),
    };
    let below = match range.min {
        Amount::Number(number) => number.checked_sub(1).map(Amount::Number),
        Amount::Time(time) => time.checked_sub(step(time)).map(Amount::Time),
    };
    let above = match range.max {
        Amount::Number(number) => Amount::Number(number + 1),
        Amount::Time(time) => Amount::Time(time + step(time)),
    };
    [below, Some(above)]
}

fn ranged(run: &Command) -> Vec<(&Arg, &Range)> {
    let settings = settings_of(run).into_iter();
    let ranged = settings.filter_map(|arg| Some((arg, range::range(arg)?)));
    ranged.collect()
}

#[test]
fn each_number_and_each_duration_has_a_range_and_a_default_within() {
    let amounts = [
        TypeId::of::<u8>(),
        TypeId::of::<u16>(),
        TypeId::of::<u32>(),
        TypeId::of::<Duration>(),
        TypeId::of::<Seconds>(),
        TypeId::of::<Interval>(),
        TypeId::of::<GcInterval>(),
        TypeId::of::<ProbeChoice>(),
        TypeId::of::<MasqueradePorts>(),
    ];
    let run = run();
    let defaults = run.clone().get_matches_from([""; 0]);
    let mut count = 0;
    for arg in settings_of(&run) {
        let parsed = arg.get_value_parser().type_id();
        let is_amount = amounts.iter().any(|amount| parsed == *amount);
        assert_eq!(
            range::range(arg).is_some(),
            is_amount,
            "{}",
            form::name(arg)
        );
        assert_eq!(range::outside(arg, &defaults), None, "{}", form::name(arg));
        count += usize::from(is_amount);
    }
    assert!(count >= 40, "{count}");
}

#[test]
fn a_value_outside_its_range_is_refused_wherever_it_comes_from() {
    let run = run();
    for (arg, range) in ranged(&run) {
        let name = form::name(arg);
        for limit in [range.min, range.max] {
            assert_eq!(
                invalid::check_value(arg, &with_amount(arg, limit)),
                Ok(()),
                "{name}"
            );
        }
        for amount in beside(range).into_iter().flatten() {
            let value = with_amount(arg, amount);
            for source in SOURCES {
                let mut written = Written::new();
                written.write(source, name, &value);
                let error = written.load().expect_err(name);
                let place = match written.origin(source, name) {
                    Origin::Environment { variable } => variable,
                    // The value begins after the indentation, the name and ": ".
                    Origin::File { path, line, .. } => {
                        format!("{path}:{line}:{}: {name}", name.len() + 5)
                    }
                    _ => format!("--{name}"),
                };
                assert!(
                    error.starts_with(&format!("{place} '{value}': ")),
                    "{error}"
                );
                assert!(error.ends_with(&format!(" must be {range}")), "{error}");
                assert!(!error.contains('\n'), "{error:?}");
            }
        }
    }
}

#[test]
fn numbers_beyond_their_type_and_words_are_out_of_range_too() {
    for value in [
        "-1",
        "4294967296",
        "99999999999999999999",
        "many",
        "0x10",
        "1.5",
    ] {
        let mut written = Written::new();
        written.write(Source::Flag, "probe-rate", value);
        let error = written.load().expect_err(value);
        let expected = "must be 1 to 1000000 probes per second";
        assert_eq!(error, format!("--probe-rate '{value}': {expected}"));
    }
}

#[test]
fn the_schema_the_reference_and_the_help_have_the_ranges() {
    let run = run();
    let schema = schema(&run);
    let validator = jsonschema::validator_for(&schema).expect("a schema");
    let reference = reference(&run);
    let help = with_ranges_in_help(run.clone());
    for (arg, range) in ranged(&run) {
        let (name, group) = (form::name(arg), form::group(arg).expect("a group"));
        let described = &schema["properties"][&group]["properties"][name];
        let value = &described["anyOf"][0];
        if let (Amount::Number(min), Amount::Number(max)) = (range.min, range.max)
            && value["type"] == "integer"
        {
            assert_eq!(
                (&value["minimum"], &value["maximum"]),
                (&min.into(), &max.into())
            );
            let is_valid =
                |number: i64| validator.is_valid(&serde_json::json!({ &group: { name: number } }));
            assert!(is_valid(min.into()) && is_valid(max.into()), "{name}");
            assert!(
                !is_valid(i64::from(min) - 1) && !is_valid(i64::from(max) + 1),
                "{name}"
            );
        } else {
            assert_eq!(value["x-minimum"], range.min.to_string(), "{name}");
            assert_eq!(value["x-maximum"], range.max.to_string(), "{name}");
        }
        let row = reference
            .lines()
            .find(|row| row.starts_with(&format!("| `{name}` |")));
        assert!(
            row.expect(name).contains(&format!(" | {range} | ")),
            "{row:?}"
        );
        let arg = help.get_arguments().find(|arg| form::name(arg) == name);
        let text = arg.and_then(Arg::get_help).expect(name).to_string();
        assert!(text.ends_with(&format!(" [range: {range}]")), "{text}");
    }
}
