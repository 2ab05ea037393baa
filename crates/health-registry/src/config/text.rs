//! Settings that are written as one text, as on the command line.

/// Makes serde write a type in its displayed form and parse it back: `into = "String", try_from = "String"`.
macro_rules! text_form {
    ($setting:ty, $error:ty) => {
        impl From<$setting> for String {
            fn from(setting: $setting) -> Self {
                setting.to_string()
            }
        }

        impl TryFrom<String> for $setting {
            type Error = $error;

            fn try_from(text: String) -> Result<Self, Self::Error> {
                text.parse()
            }
        }
    };
}
