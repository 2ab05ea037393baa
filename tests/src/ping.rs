//! Reading what `ping` sums up.

use anyhow::Context as _;

/// The summary of one run of `ping`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Echo requests sent.
    pub transmitted: u64,
    /// Replies.
    pub received: u64,
}

impl Summary {
    /// Finds the line `N packets transmitted, M received, ...`.
    pub fn parse(output: &str) -> anyhow::Result<Self> {
        let line = output
            .lines()
            .find(|line| line.contains(" packets transmitted, "))
            .with_context(|| format!("no summary in the output of ping: {output}"))?;
        let count = |what: &str| {
            line.split(", ")
                .find_map(|part| part.strip_suffix(what)?.trim().parse().ok())
                .with_context(|| format!("no number {what} in: {line}"))
        };
        Ok(Self {
            transmitted: count("packets transmitted")?,
            received: count("received")?,
        })
    }

    /// Requests that had no reply.
    pub fn lost(&self) -> u64 {
        self.transmitted.saturating_sub(self.received)
    }
}

#[cfg(test)]
mod tests {
    use super::Summary;

    #[test]
    fn a_summary_is_found() {
        let output = "PING 10.244.1.7 (10.244.1.7) 56(84) bytes of data.\n.\n\
                      --- 10.244.1.7 ping statistics ---\n\
                      1000 packets transmitted, 998 received, +1 errors, 0.2% packet loss, time 9ms\n";
        let summary = Summary::parse(output).unwrap();
        assert_eq!((summary.transmitted, summary.received), (1000, 998));
        assert_eq!(summary.lost(), 2);
        assert!(Summary::parse("ping: unknown host").is_err());
    }
}
