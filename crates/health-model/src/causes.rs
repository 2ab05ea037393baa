//! An error and its causes as one text.

use std::error::Error;
use std::iter::successors;

/// The error and its causes, without the ones that an error's text already quotes.
pub fn with_causes(error: &(dyn Error + 'static)) -> String {
    successors(Some(error), |&error| error.source()).fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text.as_str() {
            "" => cause,
            _ if text.contains(&cause) => text,
            _ => format!("{text}: {cause}"),
        }
    })
}
