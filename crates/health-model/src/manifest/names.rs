//! Names, labels and ports as the Kubernetes API server accepts them, with its error messages.

use super::Problem;

/// Maximum length of one part of a name in bytes.
const PART_MAX: usize = 63;
/// Maximum length of a DNS subdomain in bytes.
const SUBDOMAIN_MAX: usize = 253;
/// Maximum length of a port name in bytes.
const PORT_NAME_MAX: usize = 15;

const DNS_LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must \
     start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc')";
const SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', \
     and must start and end with an alphanumeric character (e.g. 'example.com')";
const LABEL_NAME: &str = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with \
     an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc')";
const LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', \
     and must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345')";

/// Checks an object name: a DNS subdomain (RFC 1123).
pub fn check_subdomain(name: &str) -> Result<(), Problem> {
    subdomain(name).map_err(|detail| Problem::invalid(name, detail))
}

/// Checks a namespace name: a DNS label (RFC 1123).
pub fn check_dns_label(name: &str) -> Result<(), Problem> {
    let detail = if name.len() > PART_MAX {
        no_more_than(PART_MAX)
    } else if is_dns_label(name) {
        return Ok(());
    } else if subdomain(name).is_ok() {
        "must not contain dots".to_owned()
    } else {
        DNS_LABEL.to_owned()
    };
    Err(Problem::invalid(name, detail))
}

/// Checks a label key: a name with an optional prefix of a DNS subdomain and a slash.
pub fn check_label_key(key: &str) -> Result<(), Problem> {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    let detail = if name.contains('/') {
        let form = LABEL_NAME.trim_start_matches("name part ");
        format!(
            "a valid label key {form} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
        )
    } else if prefix == Some("") {
        "prefix part must be non-empty".to_owned()
    } else if let Some(Err(detail)) = prefix.map(subdomain) {
        format!("prefix part {detail}")
    } else if name.is_empty() {
        "name part must be non-empty".to_owned()
    } else if name.len() > PART_MAX {
        format!("name part {}", no_more_than(PART_MAX))
    } else if is_label_text(name) {
        return Ok(());
    } else {
        LABEL_NAME.to_owned()
    };
    Err(Problem::invalid(key, detail))
}

/// Checks a label value; it may be empty.
pub fn check_label_value(value: &str) -> Result<(), Problem> {
    let detail = if value.len() > PART_MAX {
        no_more_than(PART_MAX)
    } else if value.is_empty() || is_label_text(value) {
        return Ok(());
    } else {
        LABEL_VALUE.to_owned()
    };
    Err(Problem::invalid(value, detail))
}

/// Checks a port name: at most 15 lower-case letters, digits and `-`, at least one letter, and no `-` that is doubled
/// or at either end. Returns what is wrong.
pub fn check_port_name(name: &str) -> Option<&'static str> {
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if name.len() > PORT_NAME_MAX {
        Some("must be no more than 15 characters")
    } else if !name.bytes().all(fits) {
        Some("must contain only lower-case letters, digits and hyphens (-)")
    } else if !name.bytes().any(|byte| byte.is_ascii_lowercase()) {
        Some("must contain at least one letter (a-z)")
    } else if name.contains("--") {
        Some("must not contain consecutive hyphens")
    } else if name.starts_with('-') || name.ends_with('-') {
        Some("must not begin or end with a hyphen")
    } else {
        None
    }
}

fn no_more_than(max: usize) -> String {
    format!("must be no more than {max} bytes")
}

fn subdomain(name: &str) -> Result<(), String> {
    if name.len() > SUBDOMAIN_MAX {
        Err(no_more_than(SUBDOMAIN_MAX))
    } else if name.split('.').all(is_dns_label) {
        Ok(())
    } else {
        Err(SUBDOMAIN.to_owned())
    }
}

/// Whether a text is a DNS label, of any length.
fn is_dns_label(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_outer = |byte: Option<u8>| byte.is_some_and(|byte| byte != b'-');
    text.bytes().all(is_inner)
        && is_outer(text.bytes().next())
        && is_outer(text.bytes().next_back())
}

/// Whether a text can be the name part of a label key, or a label value, apart from its length.
fn is_label_text(text: &str) -> bool {
    let is_outer = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    let is_inner = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    text.bytes().all(is_inner)
        && is_outer(text.bytes().next())
        && is_outer(text.bytes().next_back())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Check = fn(&str) -> Result<(), Problem>;

    #[test]
    fn names_and_labels_are_those_that_the_api_server_accepts() {
        let long = "a".repeat(64);
        let longest = "a".repeat(63);
        let prefixed = format!("{}/{longest}", ["abc"; 60].join("."));
        let too_long = ["abc"; 64].join(".");
        for (check, good, bad) in [
            (
                check_subdomain as Check,
                vec!["a", "0", "a.b-c.d", &long],
                vec!["", "-a", "a-", "a..b", ".a", "A", "a_b", "../x", &too_long],
            ),
            (
                check_dns_label,
                vec!["a", "0-a", &longest],
                vec!["", "a.b", "-a", "A", &long],
            ),
            (
                check_label_key,
                vec!["app", "A_b.c", "example.com/App", "a/0", &prefixed],
                vec![
                    "", "a b", "a/", "/a", "A/a", "a/b/c", "-a", "a-", "ключ", &long,
                ],
            ),
            (
                check_label_value,
                vec!["", "v", "A_b.c-1", &longest],
                vec!["a b", "-a", "a-", "a/b", "ä", &long],
            ),
        ] {
            for good in good {
                assert_eq!(check(good), Ok(()), "{good:?}");
            }
            for bad in bad {
                assert!(check(bad).is_err(), "{bad:?}");
            }
        }
    }

    #[test]
    fn names_of_ports_are_those_of_services() {
        for good in ["web", "http-2", "a", "123456789012345a"] {
            let is_long = good.len() > PORT_NAME_MAX;
            assert_eq!(check_port_name(good).is_some(), is_long, "{good}");
        }
        for bad in ["", "80", "Web", "-web", "web-", "we--b", "we_b", "wéb"] {
            assert!(check_port_name(bad).is_some(), "{bad}");
        }
    }
}
