// The fat binary of ceiling_kernels.cu, between two names.
        .section .rodata
        .balign 64
        .globl  epd_ceiling_image
        .hidden epd_ceiling_image
        .globl  epd_ceiling_image_end
        .hidden epd_ceiling_image_end
epd_ceiling_image:
        .incbin EPD_CEILING_IMAGE
epd_ceiling_image_end:
        .section .note.GNU-stack, "", %progbits
