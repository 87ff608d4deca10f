// From text to hidden states: deterministic, without a trained model, but skewed as text is. Equal pieces
// have equal embeddings and similar pieces similar ones, so common words load the same experts.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace epd::demo {

// Lower-cased words in pieces of at most five letters (later ones begin with '#'), digits and punctuation
// marks each on their own.
std::vector<std::string> split_into_pieces(std::string_view text);

// out [H]: the embedding of pieces[place], mixed with the two pieces before it and the position.
// Root mean square 1.
void embed(const std::vector<std::string>& pieces, std::size_t place, std::uint32_t hidden, float* out);

// Scales values [H] to root mean square 1.
void rms_normalize(float* values, std::uint32_t hidden);

}  // namespace epd::demo
