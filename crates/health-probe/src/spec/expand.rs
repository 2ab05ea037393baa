//! References to variables in commands.

use std::collections::BTreeMap;

/// Expands `$(NAME)` to the variable's value. References to variables that are not in `env` stay as written, `$$`
/// becomes a single `$`, and any other `$` stays unchanged.
pub fn expand(text: &str, env: &BTreeMap<String, String>) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('$') {
        expanded.push_str(before);
        let reference = after
            .strip_prefix('(')
            .and_then(|after| after.split_once(')'));
        rest = if let Some((name, after)) = reference {
            match env.get(name) {
                Some(value) => expanded.push_str(value),
                None => expanded.extend(["$(", name, ")"]),
            }
            after
        } else {
            expanded.push('$');
            after.strip_prefix('$').unwrap_or(after)
        };
    }
    expanded.push_str(rest);
    expanded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p6_references_are_expanded_from_literal_values() {
        let env = [("A", "script"), ("EMPTY", ""), ("DOLLAR", "$(A)")];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let env = BTreeMap::from(env);
        for (text, expanded) in [
            ("some $(A) $(B)", "some script $(B)"),
            ("", ""),
            ("plain", "plain"),
            ("$(A)$(A)", "scriptscript"),
            ("$(EMPTY)", ""),
            ("$(DOLLAR)", "$(A)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$script"),
            ("$", "$"),
            ("$$", "$"),
            ("$A", "$A"),
            ("$(A", "$(A"),
            ("$()", "$()"),
            ("a$(B$(A))", "a$(B$(A))"),
            ("ä$(A)ö", "äscriptö"),
        ] {
            assert_eq!(expand(text, &env), expanded, "{text}");
        }
    }
}
