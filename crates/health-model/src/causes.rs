//! An error and its causes as one string.

use std::error::Error;
use std::iter::successors;

/// Joins the error and its causes, leaving out causes that the text before them already quotes.
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
