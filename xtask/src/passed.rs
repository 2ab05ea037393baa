//! Arguments that are passed on to another program.

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, Command, Error, FromArgMatches};

/// Arguments of another program.
pub(crate) struct Passed<T> {
    pub(crate) args: T,
    /// The arguments that were given, as words of a command line.
    pub(crate) words: Vec<String>,
}

impl<T: Args> FromArgMatches for Passed<T> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        Ok(Self {
            args: T::from_arg_matches(matches)?,
            words: words::<T>(matches),
        })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl<T: Args> Args for Passed<T> {
    fn augment_args(command: Command) -> Command {
        T::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        T::augment_args_for_update(command)
    }
}

fn words<T: Args>(matches: &ArgMatches) -> Vec<String> {
    let mut words = Vec::new();
    for argument in T::augment_args(Command::new("")).get_arguments() {
        let id = argument.get_id().as_str();
        if matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        let takes_values = argument.get_action().takes_values();
        let values = matches.get_raw(id).into_iter().flatten();
        let values = values.map(|value| value.to_string_lossy());
        words.extend(values.map(|value| match argument.get_long() {
            Some(long) if takes_values => format!("--{long}={value}"),
            Some(long) => format!("--{long}"),
            None => value.into_owned(),
        }));
    }
    words
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::arguments::BenchArgs;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        bench: Passed<BenchArgs>,
        #[arg(long)]
        vm: Option<String>,
    }

    #[test]
    fn only_the_other_programs_arguments_are_passed_on() {
        let given = ["", "ct", "--vm=6.1", "--part", "a", "--part=b", "--json"];
        let cli = Cli::parse_from(given);
        assert_eq!(cli.vm.as_deref(), Some("6.1"));
        assert_eq!(cli.bench.words, ["ct", "--json", "--part=a", "--part=b"]);
        assert!(cli.bench.args.json);
    }
}
