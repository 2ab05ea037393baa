//! Errors as one text.

/// The error and what caused it, without what an error already quotes of its cause.
pub(crate) fn with_causes(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text.as_str() {
            "" => cause,
            _ if text.contains(&cause) => text,
            _ => format!("{text}: {cause}"),
        }
    })
}
